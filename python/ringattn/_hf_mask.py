"""What a Hugging Face model's mask says, on its way from transformers' mask interface to the attention function.

transformers passes masks as tensors of four dimensions, so ours is one too: int64 ``[batch, 1, 1, columns]``, on the CPU, where
the library needs the numbers. Under torch.compile one operator writes it and another reads it, so that lengths and padding are
no part of the graph.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from . import dist as _dist
from ._hf_rule import NOT_SUPPORTED
from .multihead import padding_range
from .sharding import positions

_MARK = 0x72696E6761  # no mask of a user's begins with it
_COLUMNS = 8  # mark, left, right, keys that count (a static cache has more), rows of all ranks, ranks, first key, past the last


class Mask:
    """A mask that was read: how far a key may lie, how many keys count, and which of them each batch entry has."""

    def __init__(self, rows: list[list[int]]):
        _, self.left, self.right, self.keys, self.rows, self.ranks, _, _ = rows[0]
        pairs = [(row[-2], row[-1]) for row in rows]
        self.key_range = pairs if any(pair != (0, max(self.rows, self.keys)) for pair in pairs) else None
        self.checked: Any = None  # position ids that suit it

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def window(self) -> tuple[int, int]:
        return self.left, -1 if self.is_causal and self.left < 0 else self.right


def is_mask(mask: Any) -> bool:
    """Whether a tensor may be one of these; `read` knows."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int64 and mask.shape[1:] == (1, 1, _COLUMNS)


def read(mask: Any) -> Mask:
    found = getattr(mask, "_ringattn", None)
    if found is None:
        if not is_mask(mask) or int(mask[0, 0, 0, 0]) != _MARK:
            shape = f"has shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
            raise ValueError(
                f"attention_mask {shape}; it must be [batch, tokens] and mark padding: a mask with an entry for each query and "
                f"key is not supported"
            )
        found = mask._ringattn = Mask(mask[:, 0, 0].tolist())
    return found


def write(
    attention_mask: Optional[torch.Tensor],
    seen: Optional[torch.Tensor],
    expected: Optional[torch.Tensor],
    offset: Optional[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    layout: str,
) -> torch.Tensor:
    """The mask of a forward pass.

    ``attention_mask`` is the user's, ``[batch, tokens]``, not 0 where a token counts. ``seen`` and ``expected`` are samples of
    the rule and what they must be. ``offset`` is the place of the first query where only the device knows it. ``numbers`` are
    batch, queries, place of the first query, keys, place of the first key, left, right.
    """
    where = _dist.resolve(group)
    with _dist.telling(where):
        if seen is not None and not torch.equal(seen, expected):  # type: ignore[arg-type]
            raise ValueError(f"{NOT_SUPPORTED}; position_ids that are not consecutive count as packed documents")
    batch, q_length, q_offset, kv_length, kv_offset, left, right = numbers
    first = (q_offset if offset is None else int(offset)) - kv_offset
    if isinstance(where, _dist.Processes):
        rows, keep = _on_group(where, attention_mask, batch, q_length, kv_length, first, right)
        keys = kv_length
    else:
        keys, rows = _keys(q_length, kv_length, first, left, right), 0
        keep = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + keys] != 0
        if keep is not None and keep.shape[1] < keys:
            keep = torch.nn.functional.pad(keep, (0, keys - keep.shape[1]))
        keep = None if keep is None or bool(keep.all()) else keep
    row = [_MARK, left, right, keys, rows, where.ranks, 0, rows or keys]
    mask = torch.tensor([[[row]]], device="cpu").repeat(batch, 1, 1, 1)
    if keep is None:
        mask._ringattn = Mask([row])  # type: ignore[attr-defined]  # nobody need read it
        return mask
    mask[:, 0, 0, -2:] = padding_range(~keep, group, layout, "attention_mask")
    return mask


def _keys(q_length: int, kv_length: int, first: int, left: int, right: int) -> int:
    """How many keys count: the last query meets the last of them."""
    if left < 0 and right < 0 or first + q_length == kv_length:
        return kv_length
    if right == 0 and 0 <= first and first + q_length < kv_length:
        return first + q_length
    raise ValueError(
        f"the last query is at position {first + q_length - 1} and the last key at {kv_length - 1}; ringattn needs both at the "
        f"same position"
    )


def _on_group(
    where: Any, attention_mask: Optional[torch.Tensor], batch: int, q_length: int, kv_length: int, first: int, right: int
) -> tuple[int, Optional[torch.Tensor]]:
    """The keys of all ranks, and which of this rank's count where some rank has padding. All ranks come to the same end."""
    own = [q_length, kv_length, batch, first, 0 if attention_mask is None else attention_mask.shape[1]]
    every = where.gather("attention_mask", own)
    for rank, (queries, keys, entries, begin, masked) in enumerate(every):
        if begin or (right >= 0 and queries != keys):
            raise ValueError(
                f"rank {rank} of the group has {keys} keys for {queries} queries: a cache of earlier tokens cannot be used "
                f"with register(group=...); run generate with a name registered without it"
            )
        if entries != batch:
            raise ValueError(f"rank {rank} of the group has a batch of {entries} and this rank one of {batch}")
        if masked and masked != keys:
            raise ValueError(
                f"rank {rank} of the group has an attention_mask of {masked} tokens for {keys} keys; give each rank its rows "
                f"of it: ringattn.shard(attention_mask, group, layout)"
            )
    keep = None
    if any(masked for *_, masked in every):
        keep = torch.ones(batch, kv_length, dtype=torch.bool, device="cpu") if attention_mask is None else attention_mask != 0
    return sum(keys for _, keys, *_ in every), keep


def check_positions(mask: Mask, position_ids: Optional[torch.Tensor], queries: int, where: Any, layout: str) -> None:
    """Raises if tokens that are not padding have other positions than attention assumes."""
    if isinstance(where, _dist.Processes):
        try:
            _check_rows(mask, position_ids, queries, where, layout)
        except ValueError as error:
            where.refuse(str(error))
            raise
    elif position_ids is not None and position_ids.ndim == 2 and queries > 1:
        rises = position_ids[:, 1:] > position_ids[:, :-1]
        if not bool(rises.all()) and not bool((rises | ~_counts(mask, queries, position_ids.device)).all()):
            raise ValueError(
                "position_ids restart within a sequence, as those of packed documents do; ringattn does not keep packed "
                "documents apart: give each document a batch entry of its own, padded"
            )
    mask.checked = position_ids


def _counts(mask: Mask, queries: int, device: Any) -> torch.Tensor:
    """[batch, queries - 1]: whether a token and the one before it both count."""
    if mask.key_range is None:
        return torch.ones(1, 1, dtype=torch.bool, device=device)
    place = torch.arange(mask.keys - queries + 1, mask.keys, device=device)
    limits = torch.tensor(mask.key_range, device=device).t().unsqueeze(2)
    return (place - 1 >= limits[0]) & (place < limits[1])


def _check_rows(mask: Mask, position_ids: Optional[torch.Tensor], queries: int, where: Any, layout: str) -> None:
    if position_ids is None:
        raise ValueError(
            "this model does not hand position_ids to attention, so that register(group=...) cannot tell whether the tokens of "
            "each rank have their places in the whole sequence"
        )
    rows = positions(mask.rows, where, layout, device=position_ids.device)
    alike = position_ids.shape[-1:] == rows.shape
    wrong = position_ids != rows if alike else torch.ones(1, 1, dtype=torch.bool, device=rows.device)
    if mask.key_range is not None and wrong.any():
        begin, end = torch.tensor(mask.key_range, device=rows.device).t().unsqueeze(2)
        wrong = wrong & (rows >= begin) & (rows < end)
    if wrong.any():
        raise ValueError(
            f"position_ids of rank {where.rank} are not the places of its tokens in the whole sequence of {mask.rows}; with "
            f"register(group=...) give position_ids=ringattn.positions({mask.rows}, group, {layout!r})[None]"
        )


@torch.library.custom_op(
    "ringattn::write_mask",
    mutates_args=(),
    schema=(
        "(Tensor? attention_mask, Tensor? seen, Tensor? expected, Tensor? offset, SymInt[] numbers, str group, str layout) -> "
        "Tensor"
    ),
)
def write_op(
    attention_mask: Optional[torch.Tensor],
    seen: Optional[torch.Tensor],
    expected: Optional[torch.Tensor],
    offset: Optional[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    layout: str,
) -> torch.Tensor:
    return write(attention_mask, seen, expected, offset, numbers, group, layout)


@write_op.register_fake
def _(attention_mask, seen, expected, offset, numbers, group, layout):  # type: ignore[no-untyped-def]
    return torch.empty((numbers[0], 1, 1, _COLUMNS), dtype=torch.int64, device="cpu")
