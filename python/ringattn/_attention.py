"""``attention`` for NumPy arrays and objects that support DLPack; torch tensors are handed to ringattn.torch."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional, Sequence

import numpy as np

from . import _lib
from ._arguments import checked_seed, checked_shapes, key_ranges
from ._config import Options, Shape, make_options
from ._devices import CPU
from ._engine import NOTHING, Alone, Tensor
from ._foreign import refuse
from .dist import resolve
from .sharding import take

_DTYPES = {np.dtype(np.float32): _lib.F32, np.dtype(np.float16): _lib.F16, np.dtype(np.float64): _lib.F64}


def attention(
    query: Any,
    key: Any,
    value: Any,
    segment_lengths: Optional[Sequence[int]] = None,
    dilation_rates: Optional[Sequence[int]] = None,
    is_causal: bool = False,
    window: Optional[tuple[int, int]] = None,
    key_range: Any = None,
    scale: Optional[float] = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    combine: str = "heads",
    offset: str = "branch",
    dilate_queries: bool = True,
    group: Any = None,
    layout: str = "contiguous",
    query_placement: str = "sharded",
    schedule: str = "auto",
    bucket: Optional[int] = None,
    threads: Optional[int] = None,
    timeout: Optional[float] = None,
    call_timeout: Optional[float] = None,
    kernel: str = "auto",
    return_lse: bool = False,
    **unsupported: Any,
) -> Any:
    """Exact attention over global positions, dense or dilated, alone or on a ring of ranks.

    Args:
        query: ``[B, Nq, H, D]``: NumPy array, torch tensor, or anything with ``__dlpack__``. With a group, this rank's rows.
        key, value: ``[B, Nk, Hk, D]``; H is a multiple of Hk (query head h reads KV head ``h // (H // Hk)``).
        segment_lengths, dilation_rates: the branches of a dilated pattern, a segment length of 0 meaning the whole sequence;
            None for dense attention.
        is_causal: no key after its query. The last query meets the last key, also where Nq and Nk differ.
        window: ``(left, right)``, how far before and after its query a key may lie; -1 for no limit.
        key_range: ``(begin, end)`` or one such pair for each batch entry: keys outside are not attended (padding).
        scale: of the scores; ``1 / sqrt(D)`` by default.
        dropout_p, seed: dropout of the attention weights. The mask depends on the seed and global positions alone; without a
            seed one is drawn from NumPy's or torch's global generator (of rank 0 in a group).
        combine: ``"heads"`` deals the KV heads to the branches; ``"mix"`` runs every branch on every head in one softmax.
        offset: which lattice a branch reads: ``"branch"``, ``"head"``, ``"head-block"`` or ``"residue"``.
        dilate_queries: queries off the lattice have no key in that branch and come out as zero; False lets them read it.
        group: None for this process alone; an integer for that many in-process ranks, whole tensors in and out; a
            ``torch.distributed`` process group, an mpi4py communicator or a ``custom_group``, this rank's rows in and out.
        layout: which rows a rank holds: ``"contiguous"``, ``"zigzag"`` (balances causal work) or ``"striped"``.
        query_placement: ``"sharded"``, or ``"replicated"`` for all queries on every rank.
        schedule: ``"ring"``, ``"gather"``, ``"merge"`` or ``"auto"``.
        bucket: K/V rows that travel at once; None: chosen for you.
        threads: worker threads of this rank; None for the machine's cores divided by the ranks on it.
        timeout: seconds of silence after which a rank counts as lost; None for 60.
        call_timeout: seconds that a call may last even if every rank is alive; None for no limit.
        kernel: a kernel's name, or ``"auto"``.
        return_lse: also return the log-sum-exp of the scores, ``[B, H, Nq]`` (float64 for float64, else float32).
        unsupported: arguments of other libraries raise ValueError, with their name here (``causal``) or the reason why they
            are not supported (``attn_mask``). A value that switches one off, such as None or False, is accepted.

    Returns:
        ``out`` like query, or ``(out, lse)``. A row without any key is 0, its lse -inf.

    Raises:
        ValueError: an argument is wrong; the sentence names it.
        RingattnError: a rank was lost, memory ran out, a kernel is missing. A RuntimeError; ``status`` is the library's code.

    >>> import numpy as np, ringattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 16, 4, 8), dtype=np.float32)
    >>> out, lse = ringattn.attention(q, k, v, segment_lengths=[8, 16], dilation_rates=[1, 2], is_causal=True,
    ...                               dilate_queries=False, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 16, 4, 8), (1, 4, 16))
    >>> ring = ringattn.attention(q, k, v, is_causal=True, group=4)
    >>> bool(np.allclose(ring, ringattn.attention(q, k, v, is_causal=True), atol=1e-6))
    True
    """
    if unsupported:
        refuse("attention", unsupported, group)
    given = (
        segment_lengths,
        dilation_rates,
        is_causal,
        window,
        scale,
        dropout_p,
        combine,
        offset,
        dilate_queries,
        layout,
        query_placement,
        schedule,
        bucket,
        threads,
        timeout,
        call_timeout,
        kernel,
        True,
        True,
    )
    if type(query) is not np.ndarray and _is_torch(query):
        return _torch_attention()(query, key, value, given, key_range, seed, group, return_lse)
    where, ready = _ALONE if group is None else resolve(group), None
    try:
        if type(query) is not np.ndarray or type(key) is not np.ndarray or type(value) is not np.ndarray:
            query, key, value = _from_dlpack(query, key, value)
        if type(query) is np.ndarray:
            options = make_options(given)
            ready = _prepare(query, key, value, options, key_range, seed)
    except ValueError as error:
        where.refuse(str(error))
        raise
    if ready is None:
        return _torch_attention()(query, key, value, given, key_range, seed, where, return_lse)
    return _run(query, key, value, options, ready, where, return_lse)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


_for_torch: Any = None


def _torch_attention() -> Any:
    global _for_torch
    if sys.modules["torch"].compiler.is_compiling():  # a graph that found None below would hold for the first call of all only
        from .torch import attention as found

        return found
    if _for_torch is None:
        from .torch import attention as _for_torch
    return _for_torch


# ------------------------------------------------------------------------------------------------------------------------ NumPy


def _prepare(query: np.ndarray, key: np.ndarray, value: np.ndarray, options: Options, key_range: Any, seed: Any) -> Any:
    """Everything that can be wrong with the tensors, before any other rank hears of the call."""
    code, size = _dtype_of(query.dtype), query.itemsize
    batch, rows, heads, dim, keys, kv_heads = checked_shapes(
        query.shape, key.shape, value.shape, (query.dtype, key.dtype, value.dtype)
    )
    shape = Shape(code, _lib.CPU, batch, rows, keys, heads, kv_heads, dim)
    views = _view("query", query, size), _view("key", key, size), _view("value", value, size)
    return shape, views, key_ranges(key_range, batch), _numpy_seed(seed) if options.dropout_p else 0


def _run(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, options: Options, ready: Any, where: Any, return_lse: bool
) -> Any:
    shape, views, ranges, seed = ready
    code, _, batch, rows, _, heads, _, dim = shape
    problem, seed = where.agree(options, shape, seed, ranges)
    order = where.order(problem)
    if order:
        queries, keys = order
        query = take(query, queries.there, 1, np.concatenate)
        key, value = (take(x, keys.there, 1, np.concatenate) for x in (key, value))
        views = tuple(_view("", array, query.itemsize) for array in (query, key, value))
    out = np.empty((batch, rows, heads, dim), query.dtype)
    lse, lse_view = None, NOTHING
    if return_lse:
        lse = np.empty((batch, heads, rows), np.float64 if code == _lib.F64 else np.float32)
        lse_view = (_address(lse), heads * rows, 1, rows)
    out_view = (_address(out), rows * heads * dim, heads * dim, dim)
    where.run("forward", problem, seed, ranges, CPU, (*views, out_view, lse_view), (query, key, value, out, lse))
    if order:
        out = take(out, queries.back, 1, np.concatenate)
        lse = None if lse is None else take(lse, queries.back, 2, np.concatenate)
    return (out, lse) if return_lse else out


def _dtype_of(dtype: np.dtype) -> int:
    code = _DTYPES.get(dtype)
    if code is None:
        if dtype.name != "bfloat16":
            raise ValueError(f"query has dtype {dtype}; float32, float16, bfloat16 (ml_dtypes) and float64 are supported")
        code = _DTYPES[dtype] = _lib.BF16
    return code


def _view(name: str, array: np.ndarray, size: int) -> Tensor:
    batch, row, head, last = array.strides
    if last != size and array.shape[3] > 1 and array.size:
        raise ValueError(
            f"the last dimension of {name} has a stride of {last} bytes; it must be contiguous ({size}): "
            f"np.ascontiguousarray({name}) makes it so"
        )
    if (batch | row | head) % size:
        raise ValueError(f"{name} has strides {array.strides}, which are no multiples of its {size}-byte elements")
    address = _address(array)
    if address % size:
        raise ValueError(f"{name} is not aligned to its elements of {size} bytes: {name}.copy() is")
    return address, batch // size, row // size, head // size


def _address(array: np.ndarray) -> int:
    """Where an array's elements begin; by its buffer where it has a plain one, three times as quick as __array_interface__."""
    if array.flags.carray:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except ValueError:  # empty, or of a type that buffers have no name for
            pass
    address: int = array.__array_interface__["data"][0]
    return address


def _numpy_seed(seed: Any) -> int:
    if seed is None:
        return int(np.random.randint(0, 2**63 - 1, dtype=np.int64))
    return checked_seed(seed)


# ----------------------------------------------------------------------------------------------------------------------- DLPack


_UNREADABLE = (BufferError, RuntimeError, TypeError, ValueError)  # what readers of DLPack raise


def _from_dlpack(query: Any, key: Any, value: Any) -> list[Any]:
    """The three as NumPy arrays, or as torch tensors where NumPy lacks the type or the device. Nothing is copied."""
    arrays = (query, key, value)
    for name, array in zip(("query", "key", "value"), arrays):
        if not hasattr(array, "__dlpack__"):
            raise ValueError(
                f"{name} is a {type(array).__name__}; it must be a NumPy array, a torch tensor or an object with __dlpack__"
            )
        if isinstance(array, np.ma.MaskedArray):
            raise ValueError(f"{name} is a masked array, whose mask would be ignored; use key_range or window")
    try:
        return [np.asarray(array) if isinstance(array, np.ndarray) else np.from_dlpack(array) for array in arrays]
    except _UNREADABLE as error:  # bfloat16, or memory of another device
        try:
            import torch

            return [torch.utils.dlpack.from_dlpack(array) for array in arrays]
        except ImportError:
            reason = f"NumPy cannot read query, key and value ({error}), and torch, which might, is not installed"
        except _UNREADABLE as second:
            reason = f"query, key and value cannot be read: {second}"
        raise ValueError(reason) from error


_ALONE = Alone()
