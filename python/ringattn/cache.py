"""``KVCache``: keys and values of a sequence that grows, a shard on every rank, for generating text on a ring."""

from __future__ import annotations

import operator
from typing import Any, Optional

import torch

from . import dist as _dist
from ._arguments import key_ranges
from ._attention import attention
from ._copying import OnGroup
from .sharding import positions


class KVCache(OnGroup):
    """Keys and values of a sequence that grows, for attention of its newest rows. No gradients flow through it.

    Args:
        group: as in ``ringattn.attention``.
        layout: ``"striped"`` deals rows to the ranks in turn, so that a new row goes to the end of one rank's shard, and
            nothing moves. With other layouts a longer sequence has other shards: on a group of processes they need a capacity.
        capacity: the most rows. With a layout other than striped, on a group of processes, shards are those of a sequence of so
            many rows, and ``key_range`` leaves out those that are not there yet. Positions then count from the capacity's end,
            so patterns, windows and several causal rows at once are refused until it is full.

    >>> import torch, ringattn
    >>> cache = ringattn.KVCache()
    >>> q, k, v = torch.randn(3, 1, 10, 2, 8)
    >>> for row in range(10):
    ...     cache.append(k[:, row : row + 1], v[:, row : row + 1])
    ...     out = cache.attention(q[:, row : row + 1], is_causal=True)
    >>> torch.allclose(out, ringattn.attention(q, k, v, is_causal=True)[:, -1:], atol=1e-6)
    True
    """

    remedy = "save its key and value"

    def __init__(self, group: Any = None, layout: str = "striped", capacity: Optional[int] = None):
        self.group, self.layout = group, layout
        place = _dist.place_of(group)
        self._rank, self._ranks = (0, 1) if place is None else place  # in one process all rows are here
        if capacity is not None and (isinstance(capacity, bool) or operator.index(capacity) < 1):
            raise ValueError(f"capacity is {capacity!r}; it must be a number of rows")
        self.capacity = None if capacity is None else operator.index(capacity)
        self._fixed = place is not None and layout != "striped"
        if self._fixed and capacity is None:
            raise ValueError(
                f"with layout {layout}, where a rank's rows begin depends on the length of the sequence: give capacity, the "
                f"most rows that the cache will hold, or use layout='striped', which needs none"
            )
        self._mine = positions(self.capacity if self._fixed and self.capacity else 0, group, layout)
        self._rows = 0
        self._key: Optional[torch.Tensor] = None
        self._value: Optional[torch.Tensor] = None

    def __len__(self) -> int:
        """The rows of the whole sequence."""
        return self._rows

    def _held(self, rows: int) -> int:
        """How many of the first rows of the sequence this rank holds."""
        if self._fixed:
            return int((self._mine < rows).sum())
        return max(0, -(-(rows - self._rank) // self._ranks))

    @property
    def key(self) -> torch.Tensor:
        """This rank's keys."""
        return self._shard(self._key)

    @property
    def value(self) -> torch.Tensor:
        """This rank's values."""
        return self._shard(self._value)

    def _shard(self, room: Optional[torch.Tensor]) -> torch.Tensor:
        if room is None:
            raise ValueError("the cache is empty; append keys and values first")
        return room if self._fixed else room[:, : self._held(self._rows)]

    @property
    def key_range(self) -> Optional[tuple[int, int]]:
        """The rows of ``key`` that are filled, as ``ringattn.attention`` takes them; None for all."""
        return (0, self._rows) if self._fixed else None

    def append(self, key: torch.Tensor, value: torch.Tensor, sharded: bool = False) -> None:
        """Appends rows, ``[B, N, Hk, D]``. Every rank passes the same new rows and keeps its own. With ``sharded`` each passes
        its own rows alone, as ``shard`` gives them for a striped cache (a long prompt, say); every rank must then call it."""
        if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise ValueError(f"key and value are {type(key).__name__} and {type(value).__name__}; they must be torch tensors")
        if key.shape != value.shape or key.dim() != 4:
            raise ValueError(
                f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; both must be [batch, rows, heads, head dim]"
            )
        rows = self._rows_of_all(key.size(1)) if sharded and self._ranks > 1 else key.size(1)
        total = self._rows + rows
        if self.capacity is not None and total > self.capacity:
            raise ValueError(f"the cache holds {self._rows} rows; {rows} more exceed its capacity of {self.capacity}")
        begin, end = self._held(self._rows), self._held(total)
        for name, old, new in (("_key", self._key, key), ("_value", self._value, value)):
            room = self._room(old, new, end)
            mine = new if sharded and self._ranks > 1 else self._own(new, total)
            room[:, begin:end] = mine.detach()
            setattr(self, name, room)
        self._rows = total

    def _own(self, new: torch.Tensor, total: int) -> torch.Tensor:
        """This rank's rows of new ones that end the sequence."""
        if self._fixed:
            return new[:, self._mine[self._held(self._rows) : self._held(total)].to(new.device) - self._rows]
        return new[:, (self._rank - self._rows) % self._ranks :: self._ranks]

    def _rows_of_all(self, mine: int) -> int:
        where = _dist.resolve(self.group)
        counts = [count for (count,) in where.gather("KVCache", [mine])]
        rows: int = sum(counts)
        held = self._held(self._rows + rows) - self._held(self._rows)
        for rank, (share,) in enumerate(where.gather("KVCache", [held])):
            if share != counts[rank]:
                raise ValueError(
                    f"rank {rank} appends {counts[rank]} of the {rows} new rows; with layout {self.layout}"
                    + (f", capacity {self.capacity}" if self._fixed else "")
                    + f" and {self._rows} rows in the cache its share is {share}"
                )
        return rows

    def _room(self, old: Optional[torch.Tensor], new: torch.Tensor, rows: int) -> torch.Tensor:
        """Memory for so many rows, with those that are there."""
        if old is not None and (old.shape[::2], old.size(3), old.dtype, old.device) != (
            new.shape[::2],
            new.size(3),
            new.dtype,
            new.device,
        ):
            raise ValueError(
                f"key and value are {new.dtype} {tuple(new.shape)} on {new.device}; the cache holds {old.dtype} of batch, "
                f"heads and head dim {(old.size(0), old.size(2), old.size(3))} on {old.device}"
            )
        writable = old is not None and (torch.is_inference_mode_enabled() or not old.is_inference())
        if old is not None and old.size(1) >= rows and writable:
            return old
        if self.capacity is None:
            room = max(rows, 2 * (0 if old is None else old.size(1)), 64)  # doubled, so that rows are seldom copied
        else:
            room = self._held(self.capacity)
        grown = new.new_zeros((new.size(0), room, new.size(2), new.size(3)))
        if old is not None:
            grown[:, : old.size(1)] = old
        return grown

    def _filled(self, key_range: Any, batch: int) -> list[tuple[int, int]]:
        """What of a key range is filled."""
        with _dist.telling(_dist.resolve(self.group)):
            pairs = key_ranges(key_range, batch) or ((0,) * batch, (self._rows,) * batch)
            for begin, end in zip(*pairs):
                if not 0 <= begin <= end <= (self.capacity or 0):
                    raise ValueError(f"key_range is ({begin}, {end}); it must lie within the {self.capacity} keys of the cache")
        return [(min(begin, self._rows), min(end, self._rows)) for begin, end in zip(*pairs)]

    def attention(self, query: torch.Tensor, is_causal: bool = False, key_range: Any = None, **options: Any) -> Any:
        """``ringattn.attention`` of the newest rows, whole on every rank, with all keys and values; it takes ``options``."""
        key, value = self.key, self.value
        if self._fixed and self._rows < (self.capacity or 0):
            position = [name for name in ("segment_lengths", "dilation_rates", "window") if options.get(name) is not None]
            if position or (is_causal and query.size(1) > 1):
                what = position[0] if position else f"is_causal with {query.size(1)} rows at once"
                raise ValueError(
                    f"{what} needs the positions of the queries, which a cache with layout {self.layout} knows only when it is "
                    f"full; use layout='striped'" + ("" if position else ", or one row at a time")
                )
            is_causal = False  # of one row, the newest, nothing comes later
            key_range = self._filled(key_range, query.size(0))
        return attention(
            query,
            key,
            value,
            is_causal=is_causal,
            key_range=key_range,
            group=self.group,
            layout=self.layout,
            query_placement="replicated",
            **options,
        )
