"""``attention`` for torch tensors: plain ones go straight to the library, others (compiled, traced, mapped) to operators."""

from __future__ import annotations

import operator
from typing import Any, Optional

import torch

from . import dist as _dist
from ._arguments import checked_seed, checked_shapes, key_ranges
from ._config import Options, Settings, checked, make_options
from ._operators import DTYPES, ONE_DEVICE, backward_op, forward_op, number_of, run_backward, run_forward, signed, state_of
from ._transforms import Backward, Forward, refuse_forward_mode

__all__ = ["DTYPES", "attention", "backward_op", "forward_op", "key_of", "not_tensors"]

_DROPOUT = Settings._fields.index("dropout_p")


# ------------------------------------------------------------------------------------------------------------------------ eager


class _Eager(torch.autograd.Function):
    """The same passes without torch's dispatcher, which takes longer to call a Python operator than a small attention takes."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        where: Any,
        seed: int,
        ranges: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, problem, seed = run_forward(query, key, value, options, where, seed, ranges, True, gradient=True)
        ctx.call = problem, where, seed, ranges
        ctx.set_materialize_grads(False)
        assert lse is not None
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.saved_as = [_kind(x) for x in (query, key, value, out, lse)]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[torch.Tensor], dlse: Optional[torch.Tensor]) -> Any:
        query, key, value, out, lse = saved = ctx.saved_tensors
        if [_kind(x) for x in saved] != ctx.saved_as:
            raise RuntimeError("a hook of saved tensors gave back one of another shape, type or device than it was given")
        if dout is None:
            if dlse is None:
                return None, None, None, None, None, None, None
            dout = torch.zeros_like(out)
        problem, where, seed, ranges = ctx.call
        # create_graph (a second derivative is refused, where a constant would hide it), or many gradients at once
        if torch.is_grad_enabled() or _is_batched(dout) or _is_batched(dlse):
            range_tensor = _range_tensor(ranges and list(zip(*ranges)), query.size(0))
            dq, dk, dv = Backward.apply(  # type: ignore[no-untyped-call]
                query, key, value, out, lse, dout, dlse, state_of(problem, seed), range_tensor, *problem.options, where.key
            )
        else:
            dq, dk, dv = run_backward(query, key, value, out, lse, dout, dlse, problem, where, seed, ranges)
        return dq, dk, dv, None, None, None, None


def _kind(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


def _is_batched(x: Optional[torch.Tensor]) -> bool:
    functorch = torch._C._functorch
    return x is not None and (functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


# Function.apply without its search for functorch's wrappers, which `_plain` has ruled out.
_eager: Any = super(torch.autograd.Function, _Eager).apply
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _plain(query: Any, key: Any, value: Any) -> bool:
    """Whether the tensors can be read from memory as they are: no mode, no transform, no subclass of Tensor, no meta tensor,
    no lazily negated one."""
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN or query.is_meta:
        return not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor))
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or query.is_neg()
        or key.is_neg()
        or value.is_neg()
    )


# -------------------------------------------------------------------------------------------------------------------- attention


def _name_of(group: Any) -> str:
    return _dist.key_of(group)


# What torch.compiler.assume_constant_result does, without loading the compiler (which takes as long as loading torch).
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def key_of(group: Any) -> str:
    """The name by which an operator knows a group."""
    if isinstance(group, int) and not isinstance(group, bool):
        group = operator.index(group)  # in a graph it may be a symbol, which is no constant
    return "" if group is None else _name_of(group)


def _seed_tensor(seed: Any, dropout_p: float) -> Optional[torch.Tensor]:
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.tensor(signed(checked_seed(seed)), dtype=torch.int64, device="cpu")


def _range_tensor(key_range: Any, batch: int) -> Optional[torch.Tensor]:
    if key_range is None:
        return None
    if isinstance(key_range, torch.Tensor):
        return key_range.expand(batch, 2) if key_range.shape == (2,) else key_range  # vmap folds a row for each entry
    return torch.tensor(key_ranges(key_range, batch), dtype=torch.int64, device="cpu").t().contiguous()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    given: tuple[Any, ...],
    key_range: Any,
    seed: Any,
    group: Any,
    return_lse: bool,
) -> Any:
    """``ringattn.attention`` for torch tensors, its settings given in order.

    ``seed`` and ``key_range`` may be int64 tensors, which torch.compile does not make constants of its graph.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 8, 2, 4, requires_grad=True)
    >>> out, lse = ringattn.attention(x, x, x, is_causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> x.grad.shape
    torch.Size([1, 8, 2, 4])
    """
    if torch.compiler.is_compiling():
        *tensors, settings = _operands(query, key, value, given, key_range, seed)
        out, lse, _ = forward_op(*tensors, *settings, key_of(group))
        return (out, lse) if return_lse else out
    if not _plain(query, key, value):
        name = key_of(group)
        with _dist.telling(_dist.resolve(name if _computes(query) else None)):
            *tensors, settings = _operands(query, key, value, given, key_range, seed)
        refuse_forward_mode(*tensors)
        forward: Any = forward_op if torch._C._functorch.peek_interpreter_stack() is None else Forward.apply
        out, lse, _ = forward(*tensors, *settings, name)
        return (out, lse) if return_lse else out
    refuse_forward_mode(query, key, value)
    where = _dist.resolve(group)
    try:
        query, key, value = _ready(query, key, value)
        options, ranges = make_options(given), key_ranges(key_range, query.size(0))
        number = number_of(_seed_tensor(seed, given[_DROPOUT]))
    except ValueError as error:
        where.refuse(str(error))
        raise
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out, lse = _eager(query, key, value, options, where, number, ranges)
    else:
        out, lse, _, _ = run_forward(query, key, value, options, where, number, ranges, return_lse)
    return (out, lse) if return_lse else out


def _computes(query: Any) -> bool:
    """Whether a call outside a graph runs now: then the other ranks make it, too. Traces by fake tensors do not."""
    return not (torch._C._len_torch_dispatch_stack() or query.is_meta or type(query).__name__ == "FakeTensor")


def _operands(query: Any, key: Any, value: Any, given: tuple[Any, ...], key_range: Any, seed: Any) -> tuple[Any, ...]:
    """What the operator takes, all but the group; the settings are one."""
    query, key, value = _ready(query, key, value)
    settings, seed = checked(Settings(*given)), _seed_tensor(seed, given[_DROPOUT])
    return query, key, value, seed, _range_tensor(key_range, query.size(0)), settings


def not_tensors(query: Any, key: Any, value: Any) -> str:
    """What to say where the three are not all torch tensors."""
    if isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor):
        return ""
    kinds = f"{type(query).__name__}, {type(key).__name__} and {type(value).__name__}"
    return f"query, key and value are {kinds}; they must all be torch tensors"


def _ready(query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three in autocast's type where it is on; raises where they are no tensors, or on a device that is not supported."""
    wrong = not_tensors(query, key, value)
    if wrong:
        raise ValueError(wrong)
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("query, key and value must not be nested tensors: pad them, and give key_range")
    kind = query.device.type
    if kind == "meta":
        if not key.is_meta or not value.is_meta:
            raise ValueError(ONE_DEVICE.format(query.device, key.device, value.device))
        checked_shapes(query.shape, key.shape, value.shape, (query.dtype, key.dtype, value.dtype))  # nothing else will
        return query, key, value
    if kind != "cpu" and kind != "cuda":
        raise ValueError(f"query is on {query.device}; cpu and cuda are supported")
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in (query, key, value))


def _is_cast(x: torch.Tensor) -> bool:
    """Whether autocast casts it: float64 and what is no floating-point number are left alone."""
    return x.is_floating_point() and x.dtype != torch.float64
