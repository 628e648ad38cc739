"""Arguments of ``attention`` that come with the tensors, checked: for NumPy and for torch."""

from __future__ import annotations

import operator
from typing import Any, Sequence

from . import _lib
from ._config import warn_once
from ._engine import Ranges


def checked_shapes(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], dtypes: tuple[Any, Any, Any]
) -> tuple[int, ...]:
    """(batch, query rows, heads, head dim, key rows, KV heads); raises ValueError if they do not fit each other."""
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        name, shape = next((n, s) for n, s in (("query", query), ("key", key), ("value", value)) if len(s) != 4)
        raise ValueError(f"{name} has shape {tuple(shape)}; it must be [batch, rows, heads, head dim]")
    if dtypes[0] != dtypes[1] or dtypes[0] != dtypes[2]:
        raise ValueError(f"query, key and value have dtypes {dtypes[0]}, {dtypes[1]} and {dtypes[2]}; they must be equal")
    batch, rows, heads, dim = query
    keys, kv_heads = key[1], key[2]
    if key != value:
        raise ValueError(f"key has shape {tuple(key)} and value {tuple(value)}; they must be equal")
    if key[0] != batch or key[3] != dim:
        raise ValueError(f"query has shape {tuple(query)} and key {tuple(key)}; batch and head dim must be equal")
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}; the number of query heads must be a multiple of the key heads"
        )
    if heads >= 64 and heads >= 8 * rows and rows == keys:
        warn_once(
            ("heads first",),
            f"query has shape {tuple(query)}, which is read as [batch, rows, heads, head dim]: {rows} rows of {heads} heads. "
            f"Is it [batch, heads, rows, head dim]? ringattn.sdpa takes that; or pass query.swapaxes(1, 2)",
        )
    return batch, rows, heads, dim, keys, kv_heads


def key_ranges(key_range: Any, batch: int) -> Ranges:
    """``key_range`` as (begins, ends), one of each for a batch entry."""
    if key_range is None:
        return None
    try:
        pairs = key_range.tolist() if hasattr(key_range, "tolist") else list(key_range)
        # Numbers in a graph cannot be asked for attributes.
        if len(pairs) == 2 and (isinstance(pairs[0], int) or not hasattr(pairs[0], "__len__")):
            pairs = [pairs] * batch
        if any(isinstance(number, bool) for pair in pairs for number in pair):
            raise TypeError  # a mask of two keys, whose True would be taken for 1
        begins = tuple(operator.index(begin) for begin, _ in pairs)
        ends = tuple(operator.index(end) for _, end in pairs)
    except (TypeError, ValueError):
        raise ValueError(
            f"key_range is {key_range!r}; it must be a pair (begin, end) of integers, or one for each batch entry"
        ) from None
    if len(begins) != batch:
        raise ValueError(f"key_range has {len(begins)} entries for a batch of {batch}")
    for number in begins + ends:
        _lib.fits("key_range", number)
    return begins, ends


def checked_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        raise ValueError(f"seed is {seed!r}; it must be an integer") from None
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed is {number}; it must fit into 64 bits")
    return number % 2**64
