"""``attention`` as a PyTorch operator: ``torch.ops.ringattn.forward`` and ``torch.ops.ringattn.backward``.

Operators, not Python calls, so that torch.compile keeps one graph around them. Their arguments can only be tensors, numbers and
strings: a group travels by its name, and a padding range and a dropout seed travel as small integer tensors, so that new ones
do not mean a new graph. ``forward`` also returns what the ranks agreed on before the call (global lengths and seed), which
``backward`` needs.
"""

from __future__ import annotations

from typing import Any, Optional, get_args, get_type_hints

import torch

from . import _lib
from . import dist as _dist
from ._attention import checked_seed, checked_shapes, key_ranges
from ._config import Options, Problem, Settings, Shape, checked, make_options, problem_for
from ._engine import NOTHING, Tensor
from ._memory import SMALL, blocks

_CODES = {torch.float32: _lib.F32, torch.bfloat16: _lib.BF16, torch.float16: _lib.F16, torch.float64: _lib.F64}
DTYPES = {code: dtype for dtype, code in _CODES.items()}
_KINDS = {"cpu": _lib.CPU, "cuda": _lib.CUDA}
_ONE_DEVICE = "query, key and value are on {}, {} and {}; they must be on one device"
_STATE = 3  # global query rows, global key rows, seed
_DROPOUT = Settings._fields.index("dropout_p")


# -------------------------------------------------------------------------------------------------------------------- operators


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _view(tensor: torch.Tensor) -> Tensor:
    batch, row, head, _ = tensor.stride()
    return tensor.data_ptr(), batch, row, head


def _lse_view(tensor: Optional[torch.Tensor]) -> Tensor:
    if tensor is None:
        return NOTHING
    batch, head, row = tensor.stride()
    return tensor.data_ptr(), batch, row, head


class _Device:
    """The device and stream of a call; on CUDA also makes the device current while the call runs."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> int:
        self.previous = torch.cuda.current_device()
        torch.cuda.set_device(self.device)
        return torch.cuda.current_stream(self.device).cuda_stream

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_device(self.previous)


def _run(
    where: Any, call: str, problem: Problem, seed: int, ranges: Any, tensors: tuple[Tensor, ...], owners: tuple[Any, ...]
) -> None:
    query = owners[0]
    if not query.is_cuda:
        where.run(call, problem, seed, ranges, 0, tensors, owners)
    else:
        with _Device(query.device) as stream:
            where.run(call, problem, seed, ranges, stream, tensors, owners)


def _checked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Shape, tuple[Tensor, Tensor, Tensor]]:
    """The local shape of a call and its three inputs, or what is wrong with them."""
    code = _CODES.get(query.dtype)
    if code is None:
        raise ValueError(f"query has dtype {query.dtype}; float32, bfloat16, float16 and float64 are supported")
    device = query.device
    if key.device != device or value.device != device:
        raise ValueError(_ONE_DEVICE.format(device, key.device, value.device))
    kind = _KINDS.get(device.type)
    if kind is None:
        raise ValueError(f"query is on {device}; cpu and cuda are supported")
    batch, rows, heads, dim, keys, kv_heads = checked_shapes(
        query.shape, key.shape, value.shape, (query.dtype, key.dtype, value.dtype)
    )
    views = []
    for tensor in (query, key, value):
        *strides, last = tensor.stride()
        if last != 1 and dim > 1 and tensor.numel():
            name = "query" if tensor is query else "key" if tensor is key else "value"
            if tensor.layout != torch.strided:
                raise ValueError(f"{name} has layout {tensor.layout}; only dense tensors are supported")
            raise ValueError(
                f"the last dimension of {name} has a stride of {last}; it must be contiguous: {name}.contiguous() makes it so"
            )
        views.append((tensor.data_ptr(), *strides))
    return Shape(code, kind, batch, rows, keys, heads, kv_heads, dim), tuple(views)  # type: ignore[return-value]


def _result_like(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu" and x.nbytes >= SMALL:
        memory = blocks.take(x.nbytes)
        if memory is not None:
            view, begin = memory
            return torch.frombuffer(view, dtype=x.dtype, count=x.numel(), offset=begin).view(x.shape)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def run_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Options,
    where: Any,
    seed: int,
    ranges: Any,
    want_lse: bool,
) -> tuple[torch.Tensor, Optional[torch.Tensor], Problem, int]:
    """out, lse, and what the ranks agreed on."""
    try:
        shape, views = _checked(query, key, value)
    except ValueError as error:
        where.refuse(str(error))
        raise
    problem, seed = where.agree(options, shape, seed, ranges)
    order = where.order(problem)
    if order:
        rows_q, rows_k = (torch.from_numpy(part).to(query.device) for part in order)
        query, key, value = query[:, rows_q], key[:, rows_k], value[:, rows_k]
        views = (_view(query), _view(key), _view(value))
    out, (batch, heads, rows) = _result_like(query), (shape.batch, shape.heads, shape.seq_q)
    lse, lse_view = None, NOTHING
    if want_lse:
        lse = torch.empty_strided(
            (batch, heads, rows), (heads * rows, rows, 1), dtype=_lse_dtype(query.dtype), device=query.device
        )
        lse_view = (lse.data_ptr(), heads * rows, 1, rows)
    dim = shape.head_dim
    out_view = (out.data_ptr(), rows * heads * dim, heads * dim, dim)
    _run(where, "forward", problem, seed, ranges, (*views, out_view, lse_view), (query, key, value, out, lse))
    if order:
        back = torch.argsort(rows_q)
        out, lse = out[:, back], None if lse is None else lse[:, :, back]
    return out, lse, problem, seed


def run_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: Optional[torch.Tensor],
    problem: Problem,
    where: Any,
    seed: int,
    ranges: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if dout.stride(3) != 1 and dout.size(3) > 1:  # expanded from one number, say
        dout = dout.contiguous()
    order = where.order(problem)
    if order:
        rows_q, rows_k = (torch.from_numpy(part).to(query.device) for part in order)
        query, key, value, out, dout = query[:, rows_q], key[:, rows_k], value[:, rows_k], out[:, rows_q], dout[:, rows_q]
        lse, dlse = lse[:, :, rows_q], None if dlse is None else dlse[:, :, rows_q]
    dq, dk, dv = (_result_like(x) for x in (query, key, value))
    owners = query, key, value, out, lse, dout, dlse, dq, dk, dv
    views = tuple(_lse_view(x) if x is lse or x is dlse else _view(x) for x in owners)
    _run(where, "backward", problem, seed, ranges, views, owners)
    if order:
        back_q, back_k = torch.argsort(rows_q), torch.argsort(rows_k)
        dq, dk, dv = dq[:, back_q], dk[:, back_k], dv[:, back_k]
    return dq, dk, dv


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _state(problem: Problem, seed: int) -> torch.Tensor:
    return torch.tensor((problem.shape.seq_q, problem.shape.seq_k, _signed(seed)))


def _schema_type(annotation: Any) -> str:
    """A Settings field's type in the language of operator schemas."""
    optional = type(None) in get_args(annotation)
    plain = get_args(annotation)[0] if optional else annotation
    return {tuple[int, ...]: "SymInt[]", int: "SymInt", float: "float", bool: "bool", str: "str"}[plain] + "?" * optional


# The arguments that both operators share: (*settings, group).
_SETTINGS = ", ".join(f"{_schema_type(kind)} {name}" for name, kind in get_type_hints(Settings).items()) + ", str group"


@torch.library.custom_op(
    "ringattn::forward",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? seed, Tensor? key_range, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor)",
)
def forward_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seed: Optional[torch.Tensor],
    key_range: Optional[torch.Tensor],
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options, where = make_options(settings[:-1]), _dist.resolve(settings[-1])
    ranges = key_ranges(key_range, query.size(0))
    out, lse, problem, number = run_forward(query, key, value, options, where, _number_of(seed), ranges, True)
    assert lse is not None
    return out, lse, _state(problem, number)


@forward_op.register_fake
def _(query, key, value, seed, key_range, *_):  # type: ignore[no-untyped-def]
    batch, rows, heads, _ = query.shape
    return (
        query.new_empty(query.shape),
        query.new_empty((batch, heads, rows), dtype=_lse_dtype(query.dtype)),
        torch.empty((_STATE,), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op(
    "ringattn::backward",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor state, "
        f"Tensor? key_range, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def backward_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: Optional[torch.Tensor],
    state: torch.Tensor,
    key_range: Optional[torch.Tensor],
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options, where = make_options(settings[:-1]), _dist.resolve(settings[-1])
    seq_q, seq_k, seed = state.tolist()
    problem = problem_for(options, _checked(query, key, value)[0]._replace(seq_q=seq_q, seq_k=seq_k))
    return run_backward(
        query, key, value, out, lse, dout, dlse, problem, where, seed % 2**64, key_ranges(key_range, query.size(0))
    )


@backward_op.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, _, key_range, *ctx.options = inputs
    out, lse, state = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(state)
    ctx.save_for_backward(query, key, value, out, lse, state, key_range)


def _gradient(ctx: Any, dout: Optional[torch.Tensor], dlse: Optional[torch.Tensor], _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, state, key_range = ctx.saved_tensors
    rest = (None,) * (2 + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *rest)
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = backward_op(query, key, value, out, lse, dout, dlse, state, key_range, *ctx.options)
    return (dq, dk, dv, *rest)


forward_op.register_autograd(_gradient, setup_context=_save)


# ------------------------------------------------------------------------------------------------------------------------ eager


class _Eager(torch.autograd.Function):
    """The same passes without the dispatcher, whose way to an operator in Python takes longer than a small attention."""

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
        out, lse, problem, seed = run_forward(query, key, value, options, where, seed, ranges, True)
        ctx.call = problem, where, seed, ranges
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse)
        assert lse is not None
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[torch.Tensor], dlse: Optional[torch.Tensor]) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, None, None, None, None
            dout = torch.zeros_like(out)
        problem, where, seed, ranges = ctx.call
        if torch.is_grad_enabled():  # create_graph: the operator refuses a second derivative, where a constant would hide it
            dq, dk, dv = backward_op(
                query,
                key,
                value,
                out,
                lse,
                dout,
                dlse,
                _state(problem, seed),
                _range_tensor(ranges and list(zip(*ranges)), query.size(0)),
                *problem.options,
                where.key,
            )
        else:
            dq, dk, dv = run_backward(query, key, value, out, lse, dout, dlse, problem, where, seed, ranges)
        return dq, dk, dv, None, None, None, None


# Function.apply without its search for functorch's wrappers, which `_plain` has ruled out.
_eager: Any = super(torch.autograd.Function, _Eager).apply
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _plain(query: Any, key: Any, value: Any) -> bool:
    """Whether nothing stands between tensors and memory: no mode, no transform, no subclass of Tensor, no tensor without data
    or with its signs turned lazily."""
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN or query.is_meta:
        return not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor))
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
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
    return "" if group is None else _name_of(group)


def _seed_tensor(seed: Any, dropout_p: float) -> Optional[torch.Tensor]:
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.tensor(_signed(checked_seed(seed)), dtype=torch.int64)


def _number_of(seed: Optional[torch.Tensor]) -> int:
    return 0 if seed is None else int(seed) % 2**64


def _range_tensor(key_range: Any, batch: int) -> Optional[torch.Tensor]:
    if key_range is None or isinstance(key_range, torch.Tensor):
        return key_range
    return torch.tensor(key_ranges(key_range, batch), dtype=torch.int64).t().contiguous()


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

    ``seed`` and ``key_range`` may be int64 tensors, which torch.compile does not fix in its graph.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 8, 2, 4, requires_grad=True)
    >>> out, lse = ringattn.attention(x, x, x, is_causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> x.grad.shape
    torch.Size([1, 8, 2, 4])
    """
    dropout_p = given[_DROPOUT]
    if torch.compiler.is_compiling() or not _plain(query, key, value):
        query, key, value = _ready(query, key, value)
        settings, seed = checked(Settings(*given)), _seed_tensor(seed, dropout_p)
        out, lse, _ = forward_op(query, key, value, seed, _range_tensor(key_range, query.size(0)), *settings, key_of(group))
        return (out, lse) if return_lse else out
    where = _dist.resolve(group)
    try:
        query, key, value = _ready(query, key, value)
        options, ranges = make_options(given), key_ranges(key_range, query.size(0))
        number = _number_of(_seed_tensor(seed, dropout_p))
    except ValueError as error:
        where.refuse(str(error))
        raise
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out, lse = _eager(query, key, value, options, where, number, ranges)
    else:
        out, lse, _, _ = run_forward(query, key, value, options, where, number, ranges, return_lse)
    return (out, lse) if return_lse else out


def _ready(query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three in autocast's type where it is on; raises where they are no tensors, or on a device that is not supported."""
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        raise ValueError(
            f"query, key and value are {type(query).__name__}, {type(key).__name__} and {type(value).__name__}; they must all "
            f"be torch tensors"
        )
    kind = query.device.type
    if kind == "meta":
        if not key.is_meta or not value.is_meta:
            raise ValueError(_ONE_DEVICE.format(query.device, key.device, value.device))
        return query, key, value
    if kind != "cpu" and kind != "cuda":
        raise ValueError(f"query is on {query.device}; cpu and cuda are supported")
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)  # float64 is left alone, as autocast itself does
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))  # type: ignore[return-value]
