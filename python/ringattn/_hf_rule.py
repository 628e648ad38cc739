"""Which keys a query may see, read from the rule that transformers gives for it.

transformers describes a mask by a function ``rule(batch, head, query, key)`` that compares two positions. Called with a symbol
for each of the two it tells which distances it allows, without a tensor and without a graph break. A rule that looks into a
tensor (packed documents, blocks of images) cannot be read so, and is refused.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Optional

NOT_SUPPORTED = (
    "ringattn supports causal, full and sliding-window masks with padding; this model's mask is another one (packed documents, "
    "chunks or blocks, say)"
)


class _Position:
    """``q`` times a query's position plus ``k`` times a key's, plus a number."""

    def __init__(self, q: int, k: int, number: int):
        self.q, self.k, self.number = q, k, number

    def __add__(self, other: Any) -> _Position:
        other = _position(other)
        return _Position(self.q + other.q, self.k + other.k, self.number + other.number)

    def __sub__(self, other: Any) -> _Position:
        other = _position(other)
        return _Position(self.q - other.q, self.k - other.k, self.number - other.number)

    def __abs__(self) -> _Distance:
        return _Distance(self)

    def __le__(self, other: Any) -> Limits:
        over = self - other  # not above zero
        if (over.q, over.k) == (-1, 1) and over.number <= 0:
            return Limits(None, -over.number)
        if (over.q, over.k) == (1, -1) and over.number <= 0:
            return Limits(-over.number, None)
        if over.q <= 0 and over.k <= 0 and over.number <= 0:
            return Limits(None, None)
        raise ValueError(NOT_SUPPORTED)

    def __lt__(self, other: Any) -> Limits:
        return self + 1 <= _position(other)

    def __ge__(self, other: Any) -> Limits:
        return _position(other) <= self

    def __gt__(self, other: Any) -> Limits:
        return _position(other) + 1 <= self

    def __index__(self) -> int:
        raise ValueError(NOT_SUPPORTED)

    def new_ones(self, *_: Any, **__: Any) -> Limits:
        return Limits(None, None)


def _position(value: Any) -> _Position:
    if isinstance(value, _Position):
        return value
    if isinstance(value, int):
        return _Position(0, 0, value)
    raise ValueError(NOT_SUPPORTED)


class _Distance:
    def __init__(self, position: _Position):
        self.position = position

    def __le__(self, other: Any) -> Limits:
        return (self.position <= _position(other)) & (_position(0) - self.position <= _position(other))

    def __lt__(self, other: Any) -> Limits:
        return (self.position < _position(other)) & (_position(0) - self.position < _position(other))


class Limits:
    """How far before (``left``) and after (``right``) its query a key may lie; None for no limit."""

    device = None

    def __init__(self, left: Optional[int], right: Optional[int]):
        self.left, self.right = left, right

    def __and__(self, other: Any) -> Limits:
        if not isinstance(other, Limits):
            raise ValueError(NOT_SUPPORTED)
        return Limits(_smaller(self.left, other.left), _smaller(self.right, other.right))

    def to(self, *_: Any) -> Limits:
        return self


def _smaller(a: Optional[int], b: Optional[int]) -> Optional[int]:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def read(rule: Callable[..., Any]) -> tuple[int, int]:
    """(left, right), -1 for no limit."""
    try:
        limits = rule(0, 0, _Position(1, 0, 0), _Position(0, 1, 0))
    except (AttributeError, IndexError, TypeError) as error:  # it does more than compare positions
        raise ValueError(NOT_SUPPORTED) from error
    if not isinstance(limits, Limits):
        raise ValueError(NOT_SUPPORTED)
    return -1 if limits.left is None else limits.left, -1 if limits.right is None else limits.right


def without_packing(rule: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """The rule inside one that transformers made for packed documents, which it sees in position ids that are not consecutive;
    and whether it did."""
    for part in inspect.getclosurevars(rule).nonlocals.get("mask_functions", ()):
        inner = inspect.getclosurevars(part).nonlocals
        if "position_ids" in inner and "mask_function" in inner:
            return inner["mask_function"], True
    return rule, False
