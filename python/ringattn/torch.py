"""``attention`` as a PyTorch operator: ``torch.ops.ringattn.forward`` and ``torch.ops.ringattn.backward``.

Operators, not Python calls, so that torch.compile keeps one graph around them. Their arguments can only be tensors, numbers and strings:
a group travels by its name, and a padding range and a dropout seed travel as small integer tensors, so that new ones do not mean a new
graph. ``forward`` also returns what the ranks agreed on before the call (global lengths and seed), which ``backward`` needs.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from . import _lib
from . import dist as _dist
from ._attention import checked_seed, checked_shapes, key_ranges
from ._config import Options, Shape, make_options, problem_for
from ._engine import NOTHING, Tensor

_CODES = {torch.float32: _lib.F32, torch.bfloat16: _lib.BF16, torch.float16: _lib.F16, torch.float64: _lib.F64}
DTYPES = {code: dtype for dtype, code in _CODES.items()}
_STATE = 3  # global query rows, global key rows, seed


# ---------------------------------------------------------------------------------------------------------------------- operators


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


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient as autograd hands it over, which may be expanded from one number."""
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) <= 1 else tensor.contiguous()


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


def _run(where: Any, call: str, problem: Any, seed: int, ranges: Any, device: torch.device, tensors: tuple[Tensor, ...]) -> None:
    if device.type == "cpu":
        where.run(call, problem, seed, ranges, 0, tensors)
    else:
        with _Device(device) as stream:
            where.run(call, problem, seed, ranges, stream, tensors)


def _checked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Shape:
    """The local shape of a call, or what is wrong with its tensors."""
    code = _CODES.get(query.dtype)
    if code is None:
        raise ValueError(f"query has dtype {query.dtype}; float32, bfloat16, float16 and float64 are supported")
    device = query.device
    if key.device != device or value.device != device:
        raise ValueError(f"query, key and value are on {device}, {key.device} and {value.device}; they must be on one device")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"query is on {device}; cpu and cuda are supported")
    batch, rows, heads, dim, keys, kv_heads = checked_shapes(query.shape, key.shape, value.shape, (query.dtype, key.dtype, value.dtype))
    if dim > 1:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.stride(3) != 1:
                raise ValueError(f"the last dimension of {name} has a stride of {tensor.stride(3)}; it must be contiguous: "
                                 f"{name}.contiguous() makes it so")
    return Shape(code, _lib.CUDA if device.type == "cuda" else _lib.CPU, batch, rows, keys, heads, kv_heads, dim)


def run_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, where: Any, seed: int, ranges: Any,
                want_lse: bool) -> tuple[torch.Tensor, Optional[torch.Tensor], tuple[int, int, int]]:
    try:
        shape = _checked(query, key, value)
    except ValueError as error:
        where.refuse(str(error))
        raise
    problem, seed = where.agree(options, shape, seed, ranges)
    order = where.order(problem)
    if order:
        rows_q, rows_k = (torch.from_numpy(part).to(query.device) for part in order)
        query, key, value = query[:, rows_q], key[:, rows_k], value[:, rows_k]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = None
    if want_lse:
        lse = torch.empty((shape.batch, shape.heads, shape.seq_q), dtype=_lse_dtype(query.dtype), device=query.device)
    _run(where, "forward", problem, seed, ranges, query.device, (_view(query), _view(key), _view(value), _view(out), _lse_view(lse)))
    if order:
        back = torch.argsort(rows_q)
        out, lse = out[:, back], None if lse is None else lse[:, :, back]
    return out, lse, (problem.shape.seq_q, problem.shape.seq_k, seed)


def run_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
                 dlse: Optional[torch.Tensor], options: Options, where: Any, agreed: Sequence[int],
                 ranges: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seq_q, seq_k, seed = agreed
    problem = problem_for(options, _checked(query, key, value)._replace(seq_q=seq_q, seq_k=seq_k))
    dout = _readable(dout)
    order = where.order(problem)
    if order:
        rows_q, rows_k = (torch.from_numpy(part).to(query.device) for part in order)
        query, key, value, out, dout = query[:, rows_q], key[:, rows_k], value[:, rows_k], out[:, rows_q], dout[:, rows_q]
        lse, dlse = lse[:, :, rows_q], None if dlse is None else dlse[:, :, rows_q]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    _run(where, "backward", problem, seed, ranges, query.device,
         (_view(query), _view(key), _view(value), _view(out), _lse_view(lse), _view(dout), _lse_view(dlse), _view(dq), _view(dk), _view(dv)))
    if order:
        back_q, back_k = torch.argsort(rows_q), torch.argsort(rows_k)
        dq, dk, dv = dq[:, back_q], dk[:, back_k], dv[:, back_k]
    return dq, dk, dv


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@torch.library.custom_op("ringattn::forward", mutates_args=())
def forward_op(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seed: Optional[torch.Tensor], key_range: Optional[torch.Tensor],
               segment_lengths: Sequence[int], dilation_rates: Sequence[int], is_causal: bool, window: Sequence[int],
               scale: Optional[float], dropout_p: float, combine: str, offset: str, dilate_queries: bool, group: str, layout: str,
               query_placement: str, schedule: str, bucket: int, threads: int, timeout: float, kernel: str, pool: bool,
               plan_cache: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = make_options(segment_lengths, dilation_rates, is_causal, window, scale, dropout_p, combine, offset, dilate_queries, layout,
                           query_placement, schedule, bucket, threads, timeout or None, kernel, pool, plan_cache)
    number = 0 if seed is None else int(seed) % 2**64
    out, lse, agreed = run_forward(query, key, value, options, _dist.resolve(group), number, key_ranges(key_range, query.size(0)), True)
    return out, lse, torch.tensor((agreed[0], agreed[1], _signed(agreed[2])))


@forward_op.register_fake
def _(query, key, value, seed, key_range, *_):  # type: ignore[no-untyped-def]
    batch, rows, heads, _ = query.shape
    return (query.new_empty(query.shape), query.new_empty((batch, heads, rows), dtype=_lse_dtype(query.dtype)),
            torch.empty((_STATE,), dtype=torch.int64, device="cpu"))


@torch.library.custom_op("ringattn::backward", mutates_args=())
def backward_op(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
                dlse: Optional[torch.Tensor], state: torch.Tensor, key_range: Optional[torch.Tensor], segment_lengths: Sequence[int],
                dilation_rates: Sequence[int], is_causal: bool, window: Sequence[int], scale: Optional[float], dropout_p: float,
                combine: str, offset: str, dilate_queries: bool, group: str, layout: str, query_placement: str, schedule: str, bucket: int,
                threads: int, timeout: float, kernel: str, pool: bool,
                plan_cache: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = make_options(segment_lengths, dilation_rates, is_causal, window, scale, dropout_p, combine, offset, dilate_queries, layout,
                           query_placement, schedule, bucket, threads, timeout or None, kernel, pool, plan_cache)
    seq_q, seq_k, seed = state.tolist()
    return run_backward(query, key, value, out, lse, dout, dlse, options, _dist.resolve(group), (seq_q, seq_k, seed % 2**64),
                        key_ranges(key_range, query.size(0)))


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


# ---------------------------------------------------------------------------------------------------------------------- attention


@torch.compiler.assume_constant_result
def _name_of(group: Any) -> str:
    return _dist.key_of(group)


def key_of(group: Any) -> str:
    """The name by which an operator knows a group."""
    return "" if group is None else _name_of(group)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's type, if it is on; float64 is left alone, as autocast itself does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _seed_tensor(seed: Any, dropout_p: float) -> Optional[torch.Tensor]:
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.tensor(_signed(checked_seed(seed)), dtype=torch.int64)


def _range_tensor(key_range: Any, batch: int) -> Optional[torch.Tensor]:
    if key_range is None or isinstance(key_range, torch.Tensor):
        return key_range
    begins, ends = key_ranges(key_range, batch)
    return torch.tensor((begins, ends), dtype=torch.int64).t()


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment_lengths: Optional[Sequence[int]] = None,
              dilation_rates: Optional[Sequence[int]] = None, is_causal: bool = False, window: Optional[tuple[int, int]] = None,
              key_range: Any = None, scale: Optional[float] = None, dropout_p: float = 0.0, seed: Any = None, combine: str = "heads",
              offset: str = "branch", dilate_queries: bool = True, group: Any = None, layout: str = "contiguous",
              query_placement: str = "sharded", schedule: str = "auto", bucket: Optional[int] = None, threads: Optional[int] = None,
              timeout: Optional[float] = None, kernel: str = "auto", return_lse: bool = False, enable_memory_pool: bool = True,
              use_pattern_cache: bool = True) -> Any:
    """``ringattn.attention`` for torch tensors, with two switches more.

    ``enable_memory_pool=False`` allocates afresh for each call, ``use_pattern_cache=False`` plans afresh for each call. ``seed`` and
    ``key_range`` may be int64 tensors, which torch.compile does not fix in its graph.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 8, 2, 4, requires_grad=True)
    >>> out, lse = ringattn.attention(x, x, x, is_causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> x.grad.shape
    torch.Size([1, 8, 2, 4])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; query, key and value must all be torch tensors")
    query, key, value = _autocast(query, key, value)
    options = make_options(segment_lengths, dilation_rates, is_causal, window, scale, dropout_p, combine, offset, dilate_queries, layout,
                           query_placement, schedule, bucket, threads, timeout, kernel, enable_memory_pool, use_pattern_cache)
    seed, key_range = _seed_tensor(seed, dropout_p), _range_tensor(key_range, query.size(0))
    out, lse, _ = forward_op(
        query, key, value, seed, key_range, options.segment_lengths, options.dilation_rates, options.is_causal,
        (options.window_left, options.window_right), options.scale, options.dropout_p, options.combine, options.offset,
        options.dilate_queries, key_of(group), options.layout, options.query_placement, options.schedule,
        options.bucket, options.threads, options.timeout, options.kernel, options.pool, options.plan_cache)
    return (out, lse) if return_lse else out


def attention_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, key_range: Any, seed: Any, group: Any,
                 return_lse: bool) -> Any:
    """For tensors that came by DLPack: forward only."""
    number = 0
    if options.dropout_p:
        seed = _seed_tensor(seed, options.dropout_p)
        number = int(seed) % 2**64
    out, lse, _ = run_forward(query, key, value, options, _dist.resolve(group), number, key_ranges(key_range, query.size(0)), return_lse)
    return (out, lse) if return_lse else out
