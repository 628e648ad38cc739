"""Whole tensors and shards of them: ``shard``, ``unshard`` and ``positions``, for every layout and any length.

What lies before ``shard`` and after ``unshard`` is whole, and every rank must compute it alike; what lies between them is a
rank's own rows. Gradients follow: that of ``shard`` is gathered, so that it is whole on every rank, and that of
``unshard`` is a rank's own rows of its own gradient. Nothing is summed over the ranks.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from typing import Any, Optional

import numpy as np

from . import dist as _dist
from ._config import rows_problem

Run = tuple[int, int, int]  # start, step, count


def _runs(rows: int, layout: str, rank: int, ranks: int) -> list[Run]:
    return [run for run in rows_problem(layout, rows).shards(ranks)[rank][1] if run[2]]


def _slice(run: Run) -> slice:
    start, step, count = run
    return slice(start, start + step * (count - 1) + 1, step)


def _place(group: Any, rank: Optional[int]) -> Optional[tuple[int, int]]:
    """(rank, ranks); None where whole tensors go in and out."""
    if rank is None:
        return _dist.place_of(group)
    ranks = _dist.size_of(group)
    if isinstance(rank, bool) or not 0 <= operator.index(rank) < ranks:
        raise ValueError(f"rank is {rank!r}; group has ranks 0 to {ranks - 1}")
    return operator.index(rank), ranks


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _dimension(x: Any, dim: int) -> int:
    if not (_is_torch(x) or isinstance(x, np.ndarray)):
        raise ValueError(f"x is a {type(x).__name__}; it must be a torch tensor or a NumPy array")
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError("x is a masked array, whose mask would be ignored; give its data, and its mask in a call of its own")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}; x has {x.ndim} dimensions")
    return dim % int(x.ndim)


def shard(x: Any, group: Any = None, layout: str = "contiguous", dim: int = 1, *, rank: Optional[int] = None) -> Any:
    """The rows of a whole tensor that this rank holds; a view of x where one stride describes them.

    Args:
        x: torch tensor or NumPy array, equal on every rank.
        group: as in ``attention``. With None or an integer whole tensors go in and out of a call: x itself is returned.
        layout: as in ``attention``.
        dim: the dimension of the rows.
        rank: whose rows; this process's by default. With it ``group`` may be an integer, the number of ranks, and gradients are
            those of plain indexing.

    The gradient of x is gathered from all ranks: whole, and equal everywhere.

    >>> import numpy as np, ringattn
    >>> [ringattn.shard(np.arange(10), 2, layout, dim=0, rank=0).tolist() for layout in ("contiguous", "zigzag", "striped")]
    [[0, 1, 2, 3, 4], [0, 1, 2, 8, 9], [0, 2, 4, 6, 8]]
    """
    dim, place = _dimension(x, dim), _place(group, rank)
    if place is None:
        rows_problem(layout, 1)  # a layout that nobody knows
        return x
    if _is_torch(x):
        from ._sharding_torch import shard_tensor

        return shard_tensor(x, _runs(x.shape[dim], layout, *place), layout, dim, None if rank is not None else group)
    return take(x, _runs(x.shape[dim], layout, *place), dim, np.concatenate)


def take(x: Any, runs: list[Run], dim: int, join: Any) -> Any:
    """Rows of a tensor by their runs; a view where there is one run."""
    before = (slice(None),) * dim
    parts = [x[(*before, _slice(run))] for run in runs] or [x[(*before, slice(0, 0))]]
    return parts[0] if len(parts) == 1 else join(parts, dim)


def unshard(x: Any, group: Any = None, layout: str = "contiguous", dim: int = 1) -> Any:
    """Undoes ``shard``: the whole tensor, on every rank, from each rank's rows. Every rank of a group of processes calls it.

    Every rank must compute the same from the whole tensor: the gradient of x is this rank's rows of its own gradient, and
    nothing is summed. (``gather_from_rank`` sums.)

    >>> import numpy as np, ringattn
    >>> ringattn.unshard(np.arange(10), dim=0).shape
    (10,)
    """
    where = _dist.resolve(None if _dist.place_of(group) is None else group)
    with _dist.telling(where):
        dim = _dimension(x, dim)
        rows_problem(layout, 1)
        if where.ranks > 1 and not _is_torch(x) and x.dtype.hasobject:
            raise ValueError(f"x has dtype {x.dtype}: Python's objects cannot go from process to process; give numbers or text")
    if where.ranks == 1:
        return x
    if _is_torch(x):
        from ._sharding_torch import unshard_tensor

        return unshard_tensor(x, where, layout, dim)
    return gather_rows(x, str(x.dtype), where, layout, dim)


def gather_rows(x: np.ndarray, dtype: str, where: Any, layout: str, dim: int) -> np.ndarray:
    """Every rank's rows of an array, each in its place."""
    rest = x.shape[:dim] + x.shape[dim + 1 :]
    kind = int.from_bytes(hashlib.blake2b(repr((dtype, rest, dim, layout)).encode(), digest_size=7).digest(), "little")
    records = where.gather("unshard", [x.shape[dim], kind])
    for rank, (_, other) in enumerate(records):
        if other != records[0][1]:
            raise ValueError(
                f"x of rank {rank} differs from that of rank 0 in dtype, layout, dim or the size of a dimension other than "
                f"dim; on this rank it is {dtype} of shape {x.shape}, layout {layout}, dim {dim}"
            )
    counts = [count for count, _ in records]
    total, longest = sum(counts), max(counts)
    runs = [_runs(total, layout, rank, where.ranks) for rank in range(where.ranks)]
    for rank, (count, mine) in enumerate(zip(counts, runs)):
        expected = sum(run[2] for run in mine)
        if count != expected:
            raise ValueError(
                f"rank {rank} of {where.ranks} holds {count} rows; with layout {layout} it must hold {expected} of {total}"
            )
    # Equal messages: a shorter shard is padded, and the padding is never read.
    padded = np.ascontiguousarray(np.moveaxis(x, dim, 0))
    if len(padded) < longest:
        padded = np.concatenate([padded, np.zeros((longest - len(padded), *rest), x.dtype)])
    every = np.empty((where.ranks, longest, *rest), x.dtype)
    where.gather_memory(padded.ctypes.data, every.ctypes.data, padded.nbytes)
    whole = np.empty((*x.shape[:dim], total, *x.shape[dim + 1 :]), x.dtype)
    rows = np.moveaxis(whole, dim, 0)
    for rank, mine in enumerate(runs):
        begin = 0
        for run in mine:
            rows[_slice(run)] = every[rank, begin : begin + run[2]]
            begin += run[2]
    return whole


def positions(n: int, group: Any = None, layout: str = "contiguous", *, rank: Optional[int] = None, device: Any = None) -> Any:
    """The global positions of the rows that this rank holds of a sequence of ``n``, in their order: an int64 torch tensor, for
    rotary embeddings, labels and masks. Never waits for another rank.

    ``group``, ``layout`` and ``rank`` are those of ``shard``: with None or an integer all of ``n``.

    >>> import ringattn
    >>> [ringattn.positions(7, 2, "zigzag", rank=rank).tolist() for rank in range(2)]
    [[0, 1, 6], [2, 3, 4, 5]]
    """
    import torch

    place = _place(group, rank)
    if isinstance(n, bool) or operator.index(n) < 0:
        raise ValueError(f"n is {n!r}; it must be the number of rows of the whole sequence")
    whole = torch.arange(operator.index(n), device=device)
    if place is None:
        rows_problem(layout, 1)
        return whole
    return take(whole, _runs(operator.index(n), layout, *place), 0, torch.cat)
