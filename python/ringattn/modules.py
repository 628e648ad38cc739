"""Attention modules without weights: ``RingDilatedAttention`` and the presets of it."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Optional, Sequence

import torch
from torch import nn

from . import _config
from . import dist as _dist
from ._alike import require_alike, warn_if_alike
from ._copying import OnGroup
from ._foreign import refuse
from .sharding import shard, unshard
from .torch import DTYPES, attention, key_of, not_tensors

_INPUTS = ("shard", "full")


def _count(ring_size: Any) -> int:
    if isinstance(ring_size, bool) or operator.index(ring_size) < 1:
        raise ValueError(f"ring_size is {ring_size!r}; it must be a number of ranks")
    return operator.index(ring_size)


def _started() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _group_for(group: Any, ring_size: Optional[int]) -> Any:
    """A module's group: as given, or ``ring_size`` ranks: torch.distributed's processes if it is started, else in-process."""
    if ring_size is None:
        return group
    ring_size = _count(ring_size)
    if group is not None:
        ranks = _dist.size_of(group)
        if ranks != ring_size:
            raise ValueError(f"ring_size is {ring_size} and group has {ranks} ranks; give only one of them, or the same number")
        return group
    if ring_size == 1:
        return None
    if _started():
        world = torch.distributed.get_world_size()
        if world != ring_size:
            raise ValueError(
                f"ring_size is {ring_size} and torch.distributed has {world} ranks; give a group of {ring_size} processes, or "
                f"group={ring_size} for ranks inside this process"
            )
        return torch.distributed.group.WORLD
    return ring_size


def _outside_graphs() -> Any:
    """``_attend_whole``, left out of torch.compile's graphs: the ranks exchange messages in it."""
    return torch.compiler.disable(RingDilatedAttention._attend_whole)


class RingDilatedAttention(OnGroup, nn.Module):
    """Dilated attention on a ring, as a module: ``forward(query, key, value, is_causal=False)`` on ``[B, N, H, D]``.

    Args:
        segment_lengths, dilation_rates: the branches; None for dense attention.
        dropout: of the attention weights, in training.
        ring_size: the number of ranks. Without ``group``: the processes of torch.distributed if it is started, which must be as
            many (each passes what ``inputs`` says), else in-process ranks (whole tensors in, whole tensors out). None: those of
            ``group``; without one, the presets take all processes of torch.distributed, or this process if it is not started.
        device: inputs on another device raise; None for any.
        dtype: what is computed in; inputs are converted, and the result converted back. None: the type of the inputs.
        enable_memory_pool: False allocates afresh for each call.
        use_pattern_cache: False plans afresh for each call.
        use_flash_attention: False uses the scalar kernels.
        bucket_size: K/V rows that travel at once; None: chosen for you.
        query_placement, schedule, dilate_queries: as in ``ringattn.attention``; None for what the preset says.
        inputs: what a rank of a group of processes passes. ``"shard"``: its own rows (with replicated queries the whole query).
            ``"full"``: the whole query, key and value, the same on every rank, and the whole result comes back; each rank must
            compute the same loss from it, so gradients are whole on every rank, too, and ``sync_gradients`` leaves them alone.
            None: ``"full"`` for the presets, ``"shard"`` here.
        group, layout, combine, offset, window, scale, threads, timeout, call_timeout: as in ``ringattn.attention``.

    The first call on a group of processes compares digests of what the ranks pass: unequal tensors under ``"full"`` (and
    unequal gradients of the result in the first backward pass) raise, equal ones under ``"shard"`` warn.

    >>> import torch, ringattn
    >>> module = ringattn.RingDilatedAttention([8, 16], [1, 2], dilate_queries=False, ring_size=4)
    >>> x = torch.randn(1, 32, 4, 8)
    >>> module(x, x, x, is_causal=True).shape
    torch.Size([1, 32, 4, 8])
    """

    remedy = "save its state_dict(), or set its group to None before"
    # What a preset says where the caller says nothing.
    preset_query_placement = "sharded"
    preset_schedule = "auto"
    preset_dilate_queries = True
    preset_inputs = "shard"
    takes_all_processes = False  # without ring_size and group

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
        dilate_queries: Optional[bool] = None,
        window: Optional[tuple[int, int]] = None,
        scale: Optional[float] = None,
        threads: Optional[int] = None,
        timeout: Optional[float] = None,
        call_timeout: Optional[float] = None,
        inputs: Optional[str] = None,
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
        self.enable_memory_pool = _config.flag("enable_memory_pool", enable_memory_pool)
        self.use_pattern_cache = _config.flag("use_pattern_cache", use_pattern_cache)
        self.use_flash_attention = _config.flag("use_flash_attention", use_flash_attention)
        self.bucket_size = bucket_size
        self.group = self._group_for(group, ring_size)
        self._all_processes = self.takes_all_processes and group is None and ring_size is None
        self.inputs = self.preset_inputs if inputs is None else inputs
        if self.inputs not in _INPUTS:
            raise ValueError(f"inputs is {inputs!r}; it must be one of {', '.join(_INPUTS)}")
        self.layout = layout
        self.query_placement = self.preset_query_placement if query_placement is None else query_placement
        self.schedule = self.preset_schedule if schedule is None else schedule
        self.combine, self.offset = combine, offset
        self.dilate_queries = self.preset_dilate_queries if dilate_queries is None else dilate_queries
        self.window, self.scale, self.threads = window, scale, threads
        self.timeout, self.call_timeout = timeout, call_timeout
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
            self.call_timeout,
            "auto" if self.use_flash_attention else "scalar",
            self.enable_memory_pool,
            self.use_pattern_cache,
        )

    _group_for = staticmethod(_group_for)

    @property
    def group(self) -> Any:
        """The ranks, as in ``ringattn.attention``."""
        if self._all_processes and _started() and torch.distributed.get_world_size() > 1:
            return torch.distributed.group.WORLD
        return self._group

    @group.setter
    def group(self, group: Any) -> None:
        self._group, self._all_processes = group, False
        self._compared = self._compared_gradient = False  # what the ranks pass

    @property
    def ring_size(self) -> int:
        """The number of ranks."""
        return _dist.size_of(self.group)

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
        refuse("forward", unsupported, self._runs_on())
        wrong = not_tensors(query, key, value)
        if wrong:
            raise _dist.refusal(self._runs_on(), ValueError(wrong))
        if self.device is not None and (
            query.device.type != self.device.type or self.device.index not in (None, query.device.index)
        ):
            reason = f"query is on {query.device} and the module on {self.device}"
            raise _dist.refusal(self._runs_on(), ValueError(reason))
        if self.dtype is None:
            return self.attend(query, key, value, is_causal, key_range, seed, return_lse)
        given, dtype, kind = query.dtype, self.dtype, query.device.type
        # Autocast would compute in its own type.
        with contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            # Integers stay what they are, and are refused: a result that is converted back to them would be cut.
            query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in (query, key, value))
            result = self.attend(query, key, value, is_causal, key_range, seed, return_lse)
        return (result[0].to(given), result[1]) if return_lse else result.to(given)

    def _runs_on(self) -> Any:
        """The group that a call runs on."""
        return self.group

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool = False,
        key_range: Any = None,
        seed: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """``forward`` on tensors that are ready: of one type, on the module's device."""
        group = self._runs_on()
        if key_of(group).startswith(_dist.PROCESSES):
            if self.inputs == "full":
                whole = _outside_graphs() if torch.compiler.is_compiling() else RingDilatedAttention._attend_whole
                return whole(self, query, key, value, is_causal, key_range, seed, return_lse)
            if not self._compared and not torch.compiler.is_compiling():
                rows = (key, value) if self.query_placement == "replicated" else (query, key, value)
                warn_if_alike(_dist.resolve(group), *rows)
                self._compared = True
        return attention(query, key, value, self.settings(is_causal), key_range, seed, group, return_lse)

    def _attend_whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool,
        key_range: Any,
        seed: Any,
        return_lse: bool,
    ) -> Any:
        """The whole tensors in, the whole result out, on a group of processes."""
        layout, replicated = self.layout, self.query_placement == "replicated"
        group = _dist.resolve(key_of(self.group))
        if not self._compared:
            require_alike(group, query=query, key=key, value=value)
            self._compared = True
        rows = query if replicated else shard(query, group, layout)
        part = attention(
            rows,
            shard(key, group, layout),
            shard(value, group, layout),
            self.settings(is_causal),
            key_range,
            seed,
            group,
            return_lse,
        )
        out, lse = part if return_lse else (part, None)
        if not replicated:
            out, lse = unshard(out, group, layout), None if lse is None else unshard(lse, group, layout, 2)
        if out.shape[1] != query.shape[1]:
            raise ValueError(
                f"query has {query.shape[1]} rows on this rank and another number on others; with inputs='full' every rank "
                f"passes the same whole query"
            )
        if out.requires_grad and not self._compared_gradient:
            out.register_hook(self._compare_gradient)
        return (out, lse) if return_lse else out

    def _compare_gradient(self, dout: torch.Tensor) -> None:
        if not self._compared_gradient:
            require_alike(_dist.resolve(self.group), dout=dout)
            self._compared_gradient = True

    def extra_repr(self) -> str:
        ranks = "" if self.group is None else f", ring_size={self.ring_size}"
        return (
            f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}, dropout={self.dropout}{ranks}, "
            f"layout={self.layout}, query_placement={self.query_placement}, schedule={self.schedule}, combine={self.combine}, "
            f"offset={self.offset}, dilate_queries={self.dilate_queries}, inputs={self.inputs}"
        )


class _Preset(RingDilatedAttention):
    """What the presets share: every rank passes the whole tensors, all processes take part, and keys and values alone are
    dilated."""

    preset_inputs = "full"
    preset_dilate_queries = False
    takes_all_processes = True


class RingDilatedAttentionHybrid(_Preset):
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


class RingDilatedAttentionV2Collective(_Preset):
    """One exchange of what each rank needs, then one step: for short sequences.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingDilatedAttentionV2Collective([32], [1], ring_size=2)(x, x, x).shape
    torch.Size([1, 32, 4, 8])
    """

    preset_schedule = "gather"


class RingDilatedAttentionV2(_Preset):
    """All queries on every rank, keys and values divided. On a group of processes with ``inputs="shard"`` query is whole, key
    and value are this rank's rows. In one process ``ring_size`` is the number of parts of keys and values that a loop would
    add to one running state, one after the other: it changes neither the result nor the memory.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingDilatedAttentionV2([32], [1], ring_size=2)(x, x, x).shape
    torch.Size([1, 32, 4, 8])
    """

    preset_query_placement = "replicated"

    def _runs_on(self) -> Any:
        group = self.group
        if self.query_placement == "replicated" and not key_of(group).startswith(_dist.PROCESSES):
            return None  # one rank goes through keys and values tile by tile with one state, however many parts they have
        return group


class RingAttentionCorrect(RingDilatedAttentionV2):
    """The loop of ``RingDilatedAttentionV2`` in this process alone, under torchrun too, dense by default. ``ring_size``, the
    number of parts, may also be given to each call.

    >>> import torch, ringattn
    >>> x = torch.randn(1, 32, 4, 8)
    >>> ringattn.RingAttentionCorrect()(x, x, x, ring_size=4).shape
    torch.Size([1, 32, 4, 8])
    """

    @staticmethod
    def _group_for(group: Any, ring_size: Optional[int]) -> Any:
        if _dist.place_of(group) is not None:
            raise ValueError(
                "group holds other processes, and RingAttentionCorrect never talks to them; RingDilatedAttentionV2 does"
            )
        return group if ring_size is None else _count(ring_size)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.inputs == "shard":
            raise ValueError("inputs must be full: RingAttentionCorrect talks to no other process, so it needs whole tensors")

    def _runs_on(self) -> Any:
        return None

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring_size: Optional[int] = None,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Any:
        if ring_size is not None:
            _count(ring_size)  # the number of parts changes nothing else
        return super().forward(query, key, value, is_causal, **kwargs)
