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
from ._arguments import checked_seed, checked_shapes, key_ranges
from ._config import Options, Problem, Settings, Shape, make_options, problem_for
from ._devices import CPU, Device, device_of
from ._engine import NOTHING, Tensor
from ._memory import SMALL, blocks
from .sharding import take

_CODES = {torch.float32: _lib.F32, torch.bfloat16: _lib.BF16, torch.float16: _lib.F16, torch.float64: _lib.F64}
DTYPES = {code: dtype for dtype, code in _CODES.items()}
ONE_DEVICE = "query, key and value are on {}, {} and {}; they must be on one device"
_STATE = 3  # global query rows, global key rows, seed


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


def _run(
    where: Any, call: str, problem: Problem, seed: int, ranges: Any, tensors: tuple[Tensor, ...], owners: tuple[Any, ...]
) -> None:
    device = _on(owners[0].device)
    if device is CPU:
        where.run(call, problem, seed, ranges, device, tensors, owners)
    else:
        with device.current():
            where.run(call, problem, seed, ranges, device, tensors, owners)


def _on(place: torch.device) -> Device:
    device = device_of(place)
    if device is None:
        raise ValueError(f"query is on {place}; cpu and cuda are supported")
    return device


def _checked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Shape, tuple[Tensor, Tensor, Tensor]]:
    """The local shape of a call and its three inputs; raises ValueError if something is wrong with them."""
    code = _CODES.get(query.dtype)
    if code is None:
        raise ValueError(f"query has dtype {query.dtype}; float32, bfloat16, float16 and float64 are supported")
    device = query.device
    if key.device != device or value.device != device:
        raise ValueError(ONE_DEVICE.format(device, key.device, value.device))
    kind = _on(device).kind
    batch, rows, heads, dim, keys, kv_heads = checked_shapes(
        query.shape, key.shape, value.shape, (query.dtype, key.dtype, value.dtype)
    )
    views, size = [], query.element_size()
    for tensor in (query, key, value):
        *strides, last = tensor.stride()
        if last != 1 and dim > 1 and tensor.numel():
            name = "query" if tensor is query else "key" if tensor is key else "value"
            if tensor.layout != torch.strided:
                raise ValueError(f"{name} has layout {tensor.layout}; only dense tensors are supported")
            raise ValueError(
                f"the last dimension of {name} has a stride of {last}; it must be contiguous: {name}.contiguous() makes it so"
            )
        address = tensor.data_ptr()
        if address % size:
            name = "query" if tensor is query else "key" if tensor is key else "value"
            raise ValueError(f"{name} is not aligned to its elements of {size} bytes: {name}.clone() is")
        views.append((address, *strides))
    return Shape(code, kind, batch, rows, keys, heads, kv_heads, dim), tuple(views)  # type: ignore[return-value]


def _readable(x: torch.Tensor) -> torch.Tensor:
    """What autograd hands to backward, as it can be read from memory: a gradient may be expanded from one number or lazily
    negated, and hooks of saved tensors may give back a copy with other strides."""
    x = x.resolve_neg()
    return x if x.stride(3) == 1 or x.size(3) < 2 else x.contiguous()


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
    gradient: bool = False,
) -> tuple[torch.Tensor, Optional[torch.Tensor], Problem, int]:
    """out, lse, and what the ranks agreed on. If a gradient is needed that cannot be computed, raises before anything runs."""
    try:
        shape, views = _checked(query, key, value)
        where.accept(_on(query.device))
    except (ValueError, _lib.RingattnError) as error:
        where.refuse(str(error))
        raise
    problem, seed = where.agree(options, shape, seed, ranges)
    order = where.order(problem)
    if order:
        queries, keys = order
        query = take(query, queries.there, 1, torch.cat)
        key, value = (take(x, keys.there, 1, torch.cat) for x in (key, value))
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
    call = "forward_with_gradient" if gradient else "forward"
    _run(where, call, problem, seed, ranges, (*views, out_view, lse_view), (query, key, value, out, lse))
    if order:
        out, lse = take(out, queries.back, 1, torch.cat), None if lse is None else take(lse, queries.back, 2, torch.cat)
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
    query, key, value, out, dout = (_readable(x) for x in (query, key, value, out, dout))
    lse, dlse = lse.resolve_neg(), None if dlse is None else dlse.resolve_neg()
    order = where.order(problem)
    if order:
        queries, keys = order
        query, out, dout = (take(x, queries.there, 1, torch.cat) for x in (query, out, dout))
        key, value = (take(x, keys.there, 1, torch.cat) for x in (key, value))
        lse, dlse = take(lse, queries.there, 2, torch.cat), None if dlse is None else take(dlse, queries.there, 2, torch.cat)
    dq, dk, dv = (_result_like(x) for x in (query, key, value))
    owners = query, key, value, out, lse, dout, dlse, dq, dk, dv
    inputs = (*map(_view, (query, key, value, out)), _lse_view(lse), _view(dout), _lse_view(dlse))
    views = (*inputs, *map(_view, (dq, dk, dv)))
    _run(where, "backward", problem, seed, ranges, views, owners)
    if order:
        dq = take(dq, queries.back, 1, torch.cat)
        dk, dv = (take(x, keys.back, 1, torch.cat) for x in (dk, dv))
    return dq, dk, dv


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def state_of(problem: Problem, seed: int) -> torch.Tensor:
    return torch.tensor((problem.shape.seq_q, problem.shape.seq_k, signed(seed)), device="cpu")


def agreed(state: torch.Tensor, options: Options, *inputs: torch.Tensor) -> tuple[Problem, int]:
    """The reverse of state_of, for backward: its problem and seed."""
    seq_q, seq_k, seed = state.tolist()
    return problem_for(options, _checked(*inputs)[0]._replace(seq_q=seq_q, seq_k=seq_k)), seed % 2**64


def _schema_type(annotation: Any) -> str:
    """A Settings field's type in the language of operator schemas."""
    optional = type(None) in get_args(annotation)
    plain = get_args(annotation)[0] if optional else annotation
    return {tuple[int, ...]: "SymInt[]", int: "SymInt", float: "float", bool: "bool", str: "str"}[plain] + "?" * optional


# The arguments that every operator ends with: (*settings, group).
_SETTINGS = ", ".join(f"{_schema_type(kind)} {name}" for name, kind in get_type_hints(Settings).items()) + ", str group"


def schema(*own: str) -> str:
    """An operator's, with these arguments of its own. Forward gives out, lse and state, backward three gradients."""
    return f"(Tensor query, Tensor key, Tensor value, {', '.join(own)}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"


# What backward takes between forward's inputs and the arguments of its own.
RESULTS = ("Tensor out", "Tensor lse", "Tensor dout")


def fake_forward(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of forward without their values, for tracing."""
    batch, rows, heads = query.shape[:3]
    return (
        query.new_empty(query.shape),
        query.new_empty((batch, heads, rows), dtype=_lse_dtype(query.dtype)),
        torch.empty((_STATE,), dtype=torch.int64, device="cpu"),
    )


def fake_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.custom_op("ringattn::forward", mutates_args=(), schema=schema("Tensor? seed", "Tensor? key_range"))
def forward_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seed: Optional[torch.Tensor],
    key_range: Optional[torch.Tensor],
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where = _dist.resolve(settings[-1])
    with _dist.telling(where):
        options, ranges, number = make_options(settings[:-1]), key_ranges(key_range, query.size(0)), number_of(seed)
    out, lse, problem, number = run_forward(query, key, value, options, where, number, ranges, True)
    assert lse is not None
    return out, lse, state_of(problem, number)


forward_op.register_fake(fake_forward)


@torch.library.custom_op(
    "ringattn::backward", mutates_args=(), schema=schema(*RESULTS, "Tensor? dlse", "Tensor state", "Tensor? key_range")
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
    problem, seed = agreed(state, options, query, key, value)
    ranges = key_ranges(key_range, query.size(0))
    return run_backward(query, key, value, out, lse, dout, dlse, problem, where, seed, ranges)


backward_op.register_fake(fake_backward)


def number_of(seed: Optional[torch.Tensor]) -> int:
    return 0 if seed is None else checked_seed(seed.item() if seed.numel() == 1 else seed)


# ------------------------------------------------------------------------------------------------------------------- gradients


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, _, key_range, *ctx.options = inputs
    out, lse, state = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(state)
    ctx.save_for_backward(query, key, value, out, lse, state, key_range)


def gradient(ctx: Any, dout: Optional[torch.Tensor], dlse: Optional[torch.Tensor], backward: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, state, key_range = ctx.saved_tensors
    rest = (None,) * (2 + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *rest)
    dout = torch.zeros_like(out) if dout is None else dout
    return (*backward(query, key, value, out, lse, dout, dlse, state, key_range, *ctx.options), *rest)


def no_second_derivative(*_: Any) -> None:
    raise RuntimeError(
        "ringattn.attention has no second derivative: its gradient (create_graph=True, torch.func.grad of grad, hessian) "
        "cannot be differentiated again"
    )


forward_op.register_autograd(lambda ctx, dout, dlse, _: gradient(ctx, dout, dlse, backward_op), setup_context=save)
backward_op.register_autograd(no_second_derivative)


# ------------------------------------------------------------------------------------------------------------------------ vmap


def _fold(x: Optional[torch.Tensor], dim: Optional[int], size: int) -> Any:
    """The mapped dimension joins the batch."""
    if x is None:
        return None
    return (x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _batch(query: torch.Tensor, dim: Optional[int]) -> int:
    """That of one mapped entry; there may be none."""
    return query.size(0) if dim is None else query.movedim(dim, 0).size(1)


def _forward_of_many(info, in_dims, query, key, value, seed, key_range, *settings):  # type: ignore[no-untyped-def]
    with _dist.telling(_dist.resolve(settings[-1])):
        if in_dims[3] is not None:
            raise ValueError(
                "seed is mapped by torch.func.vmap; one seed serves the whole batch, whose entries drop out differently: give "
                'vmap randomness="same", and a seed that is not mapped'
            )
    size, batch = info.batch_size, _batch(query, in_dims[0])
    query, key, value, key_range = (
        _fold(x, in_dims[index], size) for index, x in ((0, query), (1, key), (2, value), (4, key_range))
    )
    out, lse, state = forward_op(query, key, value, seed, key_range, *settings)
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch)), state), (0, 0, None)


def _backward_of_many(info, in_dims, *arguments):  # type: ignore[no-untyped-def]
    tensors, state, key_range, settings = arguments[:7], arguments[7], arguments[8], arguments[9:]
    size, batch = info.batch_size, _batch(tensors[0], in_dims[0])
    tensors = tuple(_fold(x, dim, size) for x, dim in zip(tensors, in_dims))
    found = backward_op(*tensors, state, _fold(key_range, in_dims[8], size), *settings)
    return tuple(x.unflatten(0, (size, batch)) for x in found), (0, 0, 0)


if hasattr(forward_op, "register_vmap"):  # torch 2.5; before it calls one by one
    forward_op.register_vmap(_forward_of_many)
    backward_op.register_vmap(_backward_of_many)
