"""Attention modules without weights: ``RingDilatedAttention`` and the presets of it."""

from __future__ import annotations

import copy
import operator
from typing import Any, Optional, Sequence

import torch
from torch import nn

from . import _config, _lib
from . import dist as _dist
from .torch import DTYPES, attention

_RECOMMENDED = {
    "cpu": DTYPES[_lib.lib.ra_recommended_dtype(_lib.CPU)],
    "cuda": DTYPES[_lib.lib.ra_recommended_dtype(_lib.CUDA)],
}


def _group_for(group: Any, ring_size: Optional[int]) -> Any:
    """The group of a module: as given, or ``ring_size`` ranks, those of torch.distributed where it runs with as many."""
    if ring_size is None:
        return group
    if isinstance(ring_size, bool) or operator.index(ring_size) < 1:
        raise ValueError(f"ring_size is {ring_size!r}; it must be a number of ranks")
    if group is not None:
        ranks = _dist.size_of(group)
        if ranks != ring_size:
            raise ValueError(f"ring_size is {ring_size} and group has {ranks} ranks; give one of them, or equal ones")
        return group
    if ring_size == 1:
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world != ring_size:
            raise ValueError(
                f"ring_size is {ring_size} and torch.distributed has {world} ranks; give a group of {ring_size} processes, or "
                f"group={ring_size} for ranks inside this process"
            )
        return torch.distributed.group.WORLD
    return operator.index(ring_size)


class RingDilatedAttention(nn.Module):
    """Dilated attention on a ring, as a module: ``forward(query, key, value, is_causal=False)`` on ``[B, N, H, D]``.

    Args:
        segment_lengths, dilation_rates: the branches; None for dense attention.
        dropout: of the attention weights, in training.
        ring_size: ranks. Without ``group``: the processes of torch.distributed where that runs with as many ranks (each brings
            its own rows), else that many in-process ranks (whole tensors in, whole tensors out). None: what ``group`` says.
        device: inputs on another device raise; None for any.
        dtype: what is computed in; inputs are converted, and the result converted back. None: the library's recommendation for
            the device. float64 inputs, which serve for checking, stay float64 unless a dtype is given.
        enable_memory_pool: False allocates afresh for each call.
        use_pattern_cache: False plans afresh for each call.
        use_flash_attention: False uses the scalar kernels.
        bucket_size: K/V rows that travel at once; None to choose.
        query_placement, schedule: as in ``ringattn.attention``; None for what the preset says.
        group, layout, combine, offset, dilate_queries, window, scale, threads, timeout: as in ``ringattn.attention``.

    >>> import torch, ringattn
    >>> module = ringattn.RingDilatedAttention([8, 16], [1, 2], dilate_queries=False, ring_size=4)
    >>> x = torch.randn(1, 32, 4, 8)
    >>> module(x, x, x, is_causal=True).shape
    torch.Size([1, 32, 4, 8])
    """

    preset_query_placement = "sharded"
    preset_schedule = "auto"

    def __init__(
        self,
        segment_lengths: Optional[Sequence[int]] = None,
        dilation_rates: Optional[Sequence[int]] = None,
        dropout: float = 0.0,
        ring_size: Optional[int] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        enable_memory_pool: bool = True,
        use_pattern_cache: bool = True,
        use_flash_attention: bool = True,
        bucket_size: Optional[int] = None,
        *,
        group: Any = None,
        layout: str = "contiguous",
        query_placement: Optional[str] = None,
        schedule: Optional[str] = None,
        combine: str = "heads",
        offset: str = "branch",
        dilate_queries: bool = True,
        window: Optional[tuple[int, int]] = None,
        scale: Optional[float] = None,
        threads: Optional[int] = None,
        timeout: Optional[float] = None,
    ):
        super().__init__()
        lengths, rates = _config.pattern(segment_lengths, dilation_rates)
        self.segment_lengths = list(lengths) if segment_lengths is not None else None
        self.dilation_rates = list(rates) if dilation_rates is not None else None
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}; it must be at least 0 and less than 1")
        self.dropout = float(dropout)
        self.device = None if device is None else torch.device(device)
        if dtype is not None and dtype not in DTYPES.values():
            raise ValueError(f"dtype is {dtype}; float32, bfloat16, float16 and float64 are supported")
        self.dtype = dtype
        self.enable_memory_pool, self.use_pattern_cache = bool(enable_memory_pool), bool(use_pattern_cache)
        self.use_flash_attention, self.bucket_size = bool(use_flash_attention), bucket_size
        self.group = _group_for(group, ring_size)
        self.layout = layout
        self.query_placement = self.preset_query_placement if query_placement is None else query_placement
        self.schedule = self.preset_schedule if schedule is None else schedule
        self.combine, self.offset, self.dilate_queries = combine, offset, dilate_queries
        self.window, self.scale, self.threads, self.timeout = window, scale, threads, timeout
        _config.make_options(self.settings(False))  # a wrong argument is found here, not in the first forward

    def settings(self, is_causal: bool) -> tuple[Any, ...]:
        """What the module tells ``attention`` in a call, in the order of `_config.Settings`."""
        return (
            self.segment_lengths,
            self.dilation_rates,
            is_causal,
            self.window,
            self.scale,
            self.dropout if self.training else 0.0,
            self.combine,
            self.offset,
            self.dilate_queries,
            self.layout,
            self.query_placement,
            self.schedule,
            self.bucket_size,
            self.threads,
            self.timeout,
            "auto" if self.use_flash_attention else "scalar",
            self.enable_memory_pool,
            self.use_pattern_cache,
        )

    @property
    def ring_size(self) -> int:
        """The number of ranks."""
        return _dist.size_of(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingDilatedAttention:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.group)] = self.group  # the copy is on the same ranks
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _compute_dtype(self, query: torch.Tensor) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return query.dtype if query.dtype == torch.float64 else _RECOMMENDED.get(query.device.type, query.dtype)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool = False,
        *,
        key_range: Any = None,
        seed: Any = None,
        return_lse: bool = False,
        **unsupported: Any,
    ) -> Any:
        """``[B, N, H, D]`` in and out; this rank's rows where the group is one of processes."""
        _config.refuse("forward", unsupported)
        if self.device is not None and (
            query.device.type != self.device.type or self.device.index not in (None, query.device.index)
        ):
            raise ValueError(f"query is on {query.device} and the module on {self.device}")
        given, dtype = query.dtype, self._compute_dtype(query)
        tensors = query.to(dtype), key.to(dtype), value.to(dtype)
        result = attention(*tensors, self.settings(is_causal), key_range, seed, self.group, return_lse)
        if torch.is_autocast_enabled(query.device.type):
            return result
        return (result[0].to(given), result[1]) if return_lse else result.to(given)

    def extra_repr(self) -> str:
        ranks = "" if self.group is None else f", ring_size={self.ring_size}"
        return (
            f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}, dropout={self.dropout}{ranks}, "
            f"layout={self.layout}, query_placement={self.query_placement}, schedule={self.schedule}, combine={self.combine}, "
            f"offset={self.offset}, dilate_queries={self.dilate_queries}"
        )


class RingDilatedAttentionHybrid(RingDilatedAttention):
    """Ring passing with every feature: dilation on any number of ranks, buffer pool, plan cache, fast kernels.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingDilatedAttentionHybrid([32], [1], ring_size=2)(x, x, x).shape
    torch.Size([1, 32, 4, 8])
    """

    preset_schedule = "ring"


class RingDilatedAttentionV3(RingDilatedAttentionHybrid):
    """Ring passing: K/V go from rank to rank in buckets, so a rank holds O(n/p).

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingDilatedAttentionV3([32], [1], ring_size=2, bucket_size=8)(x, x, x).shape
    torch.Size([1, 32, 4, 8])
    """


class RingDilatedAttentionV2Collective(RingDilatedAttention):
    """One exchange of what each rank needs, then one step: for short sequences.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingDilatedAttentionV2Collective([32], [1], ring_size=2)(x, x, x).shape
    torch.Size([1, 32, 4, 8])
    """

    preset_schedule = "gather"


class RingDilatedAttentionV2(RingDilatedAttention):
    """All queries on every rank, keys and values divided. On a group of processes query is whole, key and value are this rank's
    rows.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingDilatedAttentionV2([32], [1], ring_size=2)(x, x, x).shape
    torch.Size([1, 32, 4, 8])
    """

    preset_query_placement = "replicated"


class RingAttentionCorrect(RingDilatedAttentionV2):
    """Replicated queries, dense by default; the number of ranks may also be given to each call.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingAttentionCorrect()(x, x, x, ring_size=4).shape
    torch.Size([1, 32, 4, 8])
    """

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring_size: Optional[int] = None,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Any:
        if ring_size is None:
            return super().forward(query, key, value, is_causal, **kwargs)
        group, self.group = self.group, _group_for(self.group, ring_size)
        try:
            return super().forward(query, key, value, is_causal, **kwargs)
        finally:
            self.group = group
