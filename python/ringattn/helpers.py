"""Building blocks for one's own ring attention, for study and for experiments: ranks, passing tensors round, merging partial
results.

``RingDilatedAttention`` uses none of these; the library has its own, faster ones. They compute what they say: partial results
merge by log-sum-exp, positions are global, every send has its own buffer, and gradients flow through all of them. Masks follow
torch's scaled_dot_product_attention: True means that a key takes part.
"""

from __future__ import annotations

import math
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist


def _rank(rank: Optional[int], group: Any) -> int:
    if rank is not None:
        return rank
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _ring_size(ring_size: Optional[int], group: Any) -> int:
    if ring_size is None:
        return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if ring_size < 1:
        raise ValueError(f"ring_size is {ring_size}; it must be at least 1")
    return ring_size


def _neighbour(rank: Optional[int], ring_size: Optional[int], step: int, group: Any) -> int:
    rank, size = _rank(rank, group), _ring_size(ring_size, group)
    first = rank - rank % size  # ranks form rings of `size`, one after the other
    return first + (rank - first + step) % size


def circular_rank_left(rank: Optional[int] = None, ring_size: Optional[int] = None, num: int = 1, group: Any = None) -> int:
    """The rank ``num`` places to the left on the ring of ``ring_size`` ranks that ``rank`` belongs to.

    >>> from ringattn import circular_rank_left
    >>> [circular_rank_left(rank, 4) for rank in range(8)]
    [3, 0, 1, 2, 7, 4, 5, 6]
    """
    return _neighbour(rank, ring_size, -num, group)


def circular_rank_right(rank: Optional[int] = None, ring_size: Optional[int] = None, num: int = 1, group: Any = None) -> int:
    """The rank ``num`` places to the right on the ring of ``ring_size`` ranks that ``rank`` belongs to.

    >>> from ringattn import circular_rank_right
    >>> [circular_rank_right(rank, 4) for rank in range(8)]
    [1, 2, 3, 0, 5, 6, 7, 4]
    """
    return _neighbour(rank, ring_size, num, group)


def _global(rank: int, group: Any) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def send_and_receive_(
    x: torch.Tensor, receive_buffer: torch.Tensor, send_to_rank: int, receive_from_rank: int, group: Any = None
) -> torch.Tensor:
    """Sends x to one rank while a tensor of another rank arrives in receive_buffer, which is returned.

    Both are started before either is waited for, so a ring of ranks that all call this cannot block itself. The buffer has the
    shape of what arrives, which need not be that of x, and must not share memory with x. A rank that sends to itself copies.

    >>> import torch
    >>> from ringattn import send_and_receive_
    >>> send_and_receive_(torch.ones(3), torch.empty(3), 0, 0)
    tensor([1., 1., 1.])
    """
    me = _rank(None, group)
    to_itself = send_to_rank == me and receive_from_rank == me
    if x.dtype != receive_buffer.dtype or (to_itself and x.shape != receive_buffer.shape):
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype} and receive_buffer {tuple(receive_buffer.shape)} {receive_buffer.dtype}; they "
            f"must have the same dtype, and the same shape where a rank sends to itself"
        )
    if x.numel() and x.untyped_storage().data_ptr() == receive_buffer.untyped_storage().data_ptr():
        raise ValueError("receive_buffer shares memory with x: what is being sent would be overwritten")
    if not receive_buffer.is_contiguous():
        raise ValueError("receive_buffer must be contiguous")
    if to_itself:
        return receive_buffer.copy_(x)
    operations = []  # a shard without rows is no message
    if x.numel():
        operations.append(dist.P2POp(dist.isend, x.detach().contiguous(), _global(send_to_rank, group), group))
    if receive_buffer.numel():
        operations.append(dist.P2POp(dist.irecv, receive_buffer, _global(receive_from_rank, group), group))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    return receive_buffer


class _Pass(torch.autograd.Function):
    """x goes ``num`` ranks to the right, its gradient ``num`` ranks to the left."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num: int, size: int, group: Any) -> torch.Tensor:
        ctx.num, ctx.size, ctx.group, ctx.shape = num, size, group, x.shape
        return _pass(x, _arriving_shape(x, num, size, group), num, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _pass(gradient, ctx.shape, -ctx.num, ctx.size, ctx.group), None, None, None


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def _pass(x: torch.Tensor, arriving: Sequence[int], num: int, size: int, group: Any) -> torch.Tensor:
    return send_and_receive_(
        x,
        x.new_empty(tuple(arriving)),
        circular_rank_right(None, size, num, group),
        circular_rank_left(None, size, num, group),
        group,
    )


_MOST_DIMENSIONS = 16


def _arriving_shape(x: torch.Tensor, num: int, size: int, group: Any) -> list[int]:
    """The shape of what comes from the left: shards need not be equally long."""
    if x.dim() > _MOST_DIMENSIONS:
        raise ValueError(f"x has {x.dim()} dimensions; at most {_MOST_DIMENSIONS} are supported")
    mine = [x.dim(), *x.shape] + [0] * (_MOST_DIMENSIONS - x.dim())
    header = torch.tensor(mine, device=x.device)  # nccl knows no other device
    dims, *shape = _pass(header, header.shape, num, size, group).tolist()
    return shape[:dims]


def ring_pass(x: torch.Tensor, num: int = 1, ring_size: Optional[int] = None, group: Any = None) -> torch.Tensor:
    """Passes x to the rank ``num`` places to the right; returns what came from the left, whatever its shape. All ranks have the
    same dtype.

    Differentiable: gradients go the other way round. Every rank must use what it gets (with a weight of 0, if need be), since
    one without a backward pass sends no gradient.

    >>> import torch
    >>> from ringattn import ring_pass
    >>> ring_pass(torch.ones(2), ring_size=1)
    tensor([1., 1.])
    """
    size = _ring_size(ring_size, group)
    return x if num % size == 0 else _apply(_Pass, x, num, size, group)


class RingInfo(NamedTuple):
    """Where a tensor that ``all_ring_pass`` yields comes from.

    >>> import torch
    >>> from ringattn import all_ring_pass
    >>> [info for info, _ in all_ring_pass(torch.ones(4), ring_size=1)]
    [RingInfo(ring_rank=0, iteration=0, is_first=True, is_last=True)]
    """

    ring_rank: int  # the place in the ring of the rank whose tensor this is
    iteration: int  # 0 for this rank's own
    is_first: bool
    is_last: bool


class _Chain:
    """The steps of one ``all_ring_pass``, each a node of autograd. Backward only reaches steps whose tensors a rank has used,
    and the others wait for its messages of every step: those of later steps are sent before the first that it reaches."""

    def __init__(self, size: int, group: Any):
        self.size, self.group = size, group
        self.shapes: list[list[torch.Size]] = []  # of each step's tensors
        self.reached = 0  # the step that the latest backward pass came to

    def step(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = _Step.apply(self, len(self.shapes), *tensors)  # type: ignore[no-untyped-call]
        self.shapes.append([x.shape for x in found])
        return found

    def back(self, step: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of a step's tensors where the step before it knows them."""
        return [_pass(x, shape, -1, self.size, self.group) for x, shape in zip(gradients, self.shapes[step - 1])]

    def complete(self, step: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of a step, with what comes from later ones."""
        if self.reached <= step:  # another backward pass
            self.reached = len(self.shapes)
        if self.reached == len(self.shapes) > step + 1:
            later = [x.new_zeros(shape) for x, shape in zip(gradients, self.shapes[-1])]
            for missed in range(len(self.shapes) - 1, step, -1):
                later = self.back(missed, later)
            gradients = [x + y for x, y in zip(gradients, later)]
        self.reached = step
        return gradients


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: _Chain, step: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.chain, ctx.step = chain, step
        if step == 0:
            return tuple(x.view_as(x) for x in tensors)
        size, group = chain.size, chain.group
        return tuple(_pass(x, _arriving_shape(x, 1, size, group), 1, size, group) for x in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = ctx.chain.complete(ctx.step, list(gradients))
        return None, None, *(ctx.chain.back(ctx.step, found) if ctx.step else found)


def all_ring_pass(
    *tensors: torch.Tensor, ring_size: Optional[int] = None, max_iters: Optional[int] = None, group: Any = None
) -> Iterator[tuple[RingInfo, tuple[torch.Tensor, ...]]]:
    """Yields every rank's tensors in turn, this rank's own first, then its left neighbour's and so on round the ring. Shapes
    may differ, as those of ``split_by_rank`` do where the ranks do not divide the rows.

    Every rank must go through the whole iteration (or stop after the same ``max_iters``). Gradients travel back the same way: a
    rank may skip tensors, but not all of them, since without any it has no backward pass, and the others wait for it.

    >>> import torch
    >>> from ringattn import all_ring_pass
    >>> [(info.ring_rank, x.sum().item()) for info, (x,) in all_ring_pass(torch.ones(4), ring_size=1)]
    [(0, 4.0)]
    """
    size = _ring_size(ring_size, group)
    rounds = size if max_iters is None else min(size, max_iters)
    place = _rank(None, group) % size
    chain = _Chain(size, group)
    for iteration in range(rounds):
        tensors = _next(chain, iteration, tensors) if rounds > 1 else tensors
        yield RingInfo((place - iteration) % size, iteration, iteration == 0, iteration == rounds - 1), tensors


def _next(chain: _Chain, iteration: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors of an iteration. Those that have gradients travel together, so that all ranks send theirs in one order."""
    have = [x.requires_grad and torch.is_grad_enabled() for x in tensors]
    moved = iter(chain.step(tuple(x for x, has in zip(tensors, have) if has)) if any(have) else ())
    others = (x if iteration == 0 else ring_pass(x, 1, chain.size, chain.group) for x, has in zip(tensors, have) if not has)
    return tuple(next(moved) if has else next(others) for has in have)


def _runs(rows: int, ring_size: int) -> list[int]:
    return [rows // ring_size + (rank < rows % ring_size) for rank in range(ring_size)]


def split_by_rank(
    x: torch.Tensor, rank: Optional[int] = None, ring_size: Optional[int] = None, dim: int = 1, group: Any = None
) -> torch.Tensor:
    """The rows of x that a rank holds in the contiguous layout: the rank-th of ring_size runs, longer runs first. A view.

    >>> import torch
    >>> from ringattn import split_by_rank
    >>> [split_by_rank(torch.arange(5), rank, 2, dim=0).tolist() for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    size = _ring_size(ring_size, group)
    rank = _rank(rank, group) % size
    runs = _runs(x.size(dim), size)
    return x.narrow(dim, sum(runs[:rank]), runs[rank])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        mine = torch.tensor([x.size(dim)], device=x.device)  # nccl knows no other device
        counts = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, mine, group=group)
        ctx.counts = [int(count) for count in counts]
        longest = max(ctx.counts)
        padded = x.new_zeros((longest, *x.movedim(dim, 0).shape[1:]))  # gloo gathers equal shapes
        padded[: x.size(dim)] = x.movedim(dim, 0)
        parts = [torch.empty_like(padded) for _ in ctx.counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, ctx.counts)]).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        return total.narrow(ctx.dim, sum(ctx.counts[:rank]), ctx.counts[rank]).contiguous(), None, None


def gather_from_rank(x: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Every rank's x, one after the other along dim, on every rank: undoes ``split_by_rank``. Lengths may differ.

    Differentiable: a rank's gradient is the sum of what all ranks have for its rows.

    >>> import torch
    >>> from ringattn import gather_from_rank
    >>> gather_from_rank(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return x
    return _apply(_Gather, x, dim % x.dim(), group)


# -------------------------------------------------------------------------------------------------------------------- attention


def create_causal_mask(
    seq_q: int, seq_k: Optional[int] = None, q_start: int = 0, k_start: int = 0, device: Any = None
) -> torch.Tensor:
    """Which of seq_k keys from position k_start on come no later than which of seq_q queries from q_start on: ``[seq_q,
    seq_k]``.

    >>> from ringattn import create_causal_mask
    >>> create_causal_mask(2, 3, q_start=1).tolist()
    [[True, True, False], [True, True, True]]
    """
    queries = torch.arange(q_start, q_start + seq_q, device=device)
    keys = torch.arange(k_start, k_start + (seq_q if seq_k is None else seq_k), device=device)
    return keys <= queries[:, None]


def apply_ring_mask(
    scores: torch.Tensor, q_start: int, k_start: int, is_causal: bool = True, window: Optional[tuple[int, int]] = None
) -> torch.Tensor:
    """scores ``[..., Nq, Nk]`` of a pair of chunks with -inf where causality or a window forbids the key; starts are global
    positions.

    >>> import torch
    >>> from ringattn import apply_ring_mask
    >>> apply_ring_mask(torch.zeros(2, 2), q_start=0, k_start=1).tolist()
    [[-inf, -inf], [0.0, -inf]]
    """
    distance = (
        torch.arange(k_start, k_start + scores.size(-1), device=scores.device)
        - torch.arange(q_start, q_start + scores.size(-2), device=scores.device)[:, None]
    )
    forbidden = distance > 0 if is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        left, right = window
        if left >= 0:
            forbidden = forbidden | (distance < -left)
        if right >= 0:
            forbidden = forbidden | (distance > right)
    return scores.masked_fill(forbidden, -math.inf)


def compute_attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: Optional[float] = None,
    mask: Optional[torch.Tensor] = None,
    dropout: float = 0.0,
    training: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``[B, H, N, D]`` tensors by its definition: ``(out, lse [B, H, N])``, to be merged by
    ``StableRingAccumulator``.

    ``mask`` is boolean, True where a key takes part. A row without keys is (0, -inf). Sums are at least float32.

    >>> import torch
    >>> from ringattn import compute_attention_with_lse
    >>> out, lse = compute_attention_with_lse(*torch.zeros(3, 1, 1, 4, 2))
    >>> round(lse[0, 0, 0].exp().item(), 4)
    4.0
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = scale * (query.to(wide) @ key.to(wide).transpose(-1, -2))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    top = scores.detach().amax(-1, keepdim=True) if scores.size(-1) else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    top = top.masked_fill(torch.isinf(top) & (top < 0), 0.0)  # exp(-inf - 0) = 0: an empty row stays empty and is never NaN
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    lse = torch.where(empty, torch.full_like(total, -math.inf), top + torch.log(total.masked_fill(empty, 1.0)))
    weights = weights / total.masked_fill(empty, 1.0)
    weights = torch.nn.functional.dropout(weights, dropout, training)
    return (weights @ value.to(wide)).to(query.dtype), lse.squeeze(-1)


class StableRingAccumulator:
    """Merges partial attention results over disjoint sets of keys: ``update(out, lse)`` for each, then ``get_output()``.

    The running state of a row is (sum, maximum, denominator), in float32 at least, and never updated in place, so autograd
    follows. The order of the updates does not matter beyond rounding; an empty part, (0, -inf), changes nothing.

    >>> import torch
    >>> from ringattn import StableRingAccumulator, compute_attention_with_lse
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
    >>> parts = StableRingAccumulator((1, 2, 6, 4))
    >>> for begin in (0, 3):
    ...     parts.update(*compute_attention_with_lse(q, k[:, :, begin:begin + 3], v[:, :, begin:begin + 3]))
    >>> torch.allclose(parts.get_output(), compute_attention_with_lse(q, k, v)[0], atol=1e-6)
    True
    """

    def __init__(self, output_shape: Sequence[int], device: Any = None, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        wide = torch.promote_types(dtype, torch.float32)
        shape = tuple(output_shape)
        self._sum = torch.zeros(shape, dtype=wide, device=device)
        self._top = torch.full(shape[:-1], -math.inf, dtype=wide, device=device)
        self._total = torch.zeros(shape[:-1], dtype=wide, device=device)

    def update(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the result over some keys: output of the accumulator's shape, lse without its last dimension (or 1 there)."""
        if lse.dim() == output.dim():
            lse = lse.squeeze(-1)
        if output.shape != self._sum.shape or lse.shape != self._top.shape:
            raise ValueError(
                f"output is {tuple(output.shape)} and lse {tuple(lse.shape)}; they must be {tuple(self._sum.shape)} and "
                f"{tuple(self._top.shape)}"
            )
        lse = lse.to(self._top.dtype)
        top = torch.maximum(self._top, lse.detach())
        base = top.masked_fill(top == -math.inf, 0.0)
        old, new = torch.exp(self._top - base), torch.exp(lse - base)
        self._sum = self._sum * old[..., None] + output.to(self._sum.dtype) * new[..., None]
        self._total = self._total * old + new
        self._top = top

    def get_output(self) -> torch.Tensor:
        """The merged result; 0 in rows that no part had a key for."""
        empty = self._total == 0
        return (self._sum / self._total.masked_fill(empty, 1.0)[..., None]).to(self.dtype)

    def get_lse(self) -> torch.Tensor:
        """The merged log-sum-exp; -inf in rows that no part had a key for."""
        empty = self._total == 0
        lse = self._top.masked_fill(empty, 0.0) + torch.log(self._total.masked_fill(empty, 1.0))
        return lse.masked_fill(empty, -math.inf)
