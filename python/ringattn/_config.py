"""What to compute: the arguments of ``attention`` checked, put in order, and turned into the library's descriptor."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import sys
import threading
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple, Optional, Sequence

from . import _lib
from ._lib import Desc, Meeting, Shard, Summary, lib


class HolesWarning(UserWarning):
    """Some query rows of a dilated pattern have no key at all, and come out as zero.

    >>> import warnings, numpy as np, ringattn
    >>> x = np.ones((1, 7, 2, 4), np.float32)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", ringattn.HolesWarning)
    ...     out = ringattn.attention(x, x, x, segment_lengths=[7], dilation_rates=[2])
    >>> int((out[0, :, 0, 0] == 0).sum())
    3
    """


class Shape(NamedTuple):
    """The global shape of one call."""

    dtype: int
    device: int
    batch: int
    seq_q: int
    seq_k: int
    heads: int
    kv_heads: int
    head_dim: int


class Settings(NamedTuple):
    """The settings of a call, all but tensors, key_range, seed and group, in the order of ``attention``'s arguments.

    This is the only list of them. Callers fill it with what they were given (None where something is left open); `checked`
    gives every field the type below.
    """

    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    is_causal: bool = False
    window: tuple[int, ...] = (-1, -1)
    scale: Optional[float] = None
    dropout_p: float = 0.0
    combine: str = "heads"
    offset: str = "branch"
    dilate_queries: bool = True
    layout: str = "contiguous"
    query_placement: str = "sharded"
    schedule: str = "auto"
    bucket: int = 0  # 0: chosen
    threads: int = 0  # 0: the machine's cores divided by the ranks on it
    timeout: Optional[float] = None
    call_timeout: Optional[float] = None  # None: no limit
    kernel: str = "auto"
    enable_memory_pool: bool = True  # False: buffers are allocated afresh for each call
    use_pattern_cache: bool = True  # False: plans are made afresh for each call


class Options(Settings):
    """Checked settings, and problems made from them. Compared by identity, which is quick: equal arguments get one object."""

    problems: dict[Shape, Problem]
    _desc: Optional[Desc] = None
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def desc(self) -> Desc:
        """A descriptor of all but the shape. It owns the lists that copies of it point to."""
        if self._desc is None:
            desc = Desc()
            lib.ra_attention_desc_init(desc)
            branches = len(self.segment_lengths)
            if branches:
                desc.segment_lengths = _lib.int64_array("segment_lengths", self.segment_lengths)
                desc.dilation_rates = _lib.int64_array("dilation_rates", self.dilation_rates)
            desc.branches = branches
            desc.combine, desc.offset = _lib.COMBINE[self.combine], _lib.OFFSET[self.offset]
            desc.dilate_queries, desc.causal = self.dilate_queries, self.is_causal
            desc.window_left, desc.window_right = self.window
            if self.scale is not None:
                desc.scale = self.scale
            desc.dropout = self.dropout_p
            desc.layout, desc.query_placement = _lib.LAYOUT[self.layout], _lib.PLACEMENT[self.query_placement]
            desc.schedule, desc.bucket, desc.threads = _lib.SCHEDULE[self.schedule], self.bucket, self.threads
            if self.kernel != "auto":
                desc.kernel = self.kernel.encode()
            self._desc = desc
        return self._desc


def _one_of(name: str, value: Any, table: dict[str, int]) -> str:
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(table)}")
    return value


def integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name} is {values!r}; it must be a list of integers") from None
    return tuple(_lib.fits(name, number) for number in numbers)


def pattern(
    segment_lengths: Optional[Sequence[int]], dilation_rates: Optional[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two lists of a pattern as tuples; empty for dense."""
    if segment_lengths is None and dilation_rates is None:
        return (), ()
    if segment_lengths is None or dilation_rates is None:
        missing = "segment_lengths" if segment_lengths is None else "dilation_rates"
        raise ValueError(
            f"{missing} is missing: give segment_lengths and dilation_rates together, or neither for dense attention"
        )
    lengths, rates = integers("segment_lengths", segment_lengths), integers("dilation_rates", dilation_rates)
    if len(lengths) != len(rates):
        raise ValueError(
            f"segment_lengths has {len(lengths)} entries and dilation_rates {len(rates)}; each branch needs one of each"
        )
    return lengths, rates


def limits(window: Any) -> tuple[int, int]:
    """``window=(left, right)`` as two integers, -1 for no limit."""
    if window is None:
        return -1, -1
    try:
        left, right = window
        left = -1 if left is None else operator.index(left)
        right = -1 if right is None else operator.index(right)
    except (TypeError, ValueError):
        raise ValueError(
            f"window is {window!r}; it must be a pair (left, right) of integers, -1 or None for no limit"
        ) from None
    return _lib.fits("window", left), _lib.fits("window", right)


class Problem:
    """A descriptor that the library has accepted, kept for as long as calls repeat it."""

    def __init__(self, options: Options, shape: Shape):
        self.options, self.shape = options, shape
        self.looked_for_holes = False
        self.desc = desc = Desc.from_buffer_copy(options.desc())
        (desc.dtype, desc.device, desc.batch, desc.seq_q, desc.seq_k, desc.heads, desc.kv_heads, desc.head_dim) = shape
        _lib.check(lib.ra_attention_desc_check(desc))
        self._shards: dict[int, list[tuple[Any, Any]]] = {}

    def shards(self, ranks: int) -> list[tuple[Any, Any]]:
        """The rows of each rank: ((rows, rows) of the queries, (rows, rows) of the keys), rows = (start, step, count)."""
        found = self._shards.get(ranks)
        if found is None:
            found, queries, keys = [], Shard(), Shard()
            for rank in range(ranks):
                _lib.check(lib.ra_shard_rows(self.desc, rank, ranks, queries, keys))
                rows_q, rows_k = (tuple((r.start, r.step, r.count) for r in shard.rows) for shard in (queries, keys))
                found.append((rows_q, rows_k))
            self._shards[ranks] = found
        return found

    def shard_count(self, rank: int, ranks: int) -> tuple[int, int]:
        """How many query and key rows a rank holds."""
        queries, keys = Shard(), Shard()
        _lib.check(lib.ra_shard_rows(self.desc, rank, ranks, queries, keys))
        return queries.count, keys.count

    def summary(self, rank: int = 0, ranks: int = 1) -> Summary:
        found = Summary(struct_size=ctypes.sizeof(Summary))
        _lib.check(lib.ra_plan_summary(self.desc, rank, ranks, found))
        return found

    def hops(self, ranks: int, query: int, key: int, head: int) -> int:
        """How far a key travels to a query that reads it: the shortest way of all branches."""
        meeting, found = Meeting(struct_size=ctypes.sizeof(Meeting)), ranks
        for branch in range(max(1, self.desc.branches)):
            if lib.ra_plan_meeting(self.desc, ranks, query, key, head, branch, meeting) == _lib.OK:
                found = min(found, meeting.hop)
        return found


_OPTIONS_KEPT, _PROBLEMS_KEPT = 256, 64
_options: OrderedDict[tuple[Any, ...], Options] = OrderedDict()
_warned: set[tuple[Any, ...]] = set()
_lock = threading.Lock()
_HERE = os.path.dirname(__file__)


def make_options(given: Sequence[Any]) -> Options:
    """The options of a call, whose settings are given in order; checked the first time."""
    lengths, rates, is_causal, window, *rest = given
    if lengths is not None and type(lengths) is not tuple:
        lengths = integers("segment_lengths", lengths)
    if rates is not None and type(rates) is not tuple:
        rates = integers("dilation_rates", rates)
    if window is not None:
        window = limits(window)
    key = (lengths, rates, is_causal, window, *rest)
    try:
        found = _options.get(key)
    except TypeError:  # something that cannot be hashed: the checks below say what
        found = None
    if found is None:
        settings = checked(Settings(*key))
        if not _is_constant(key):  # a tensor of one element, say, which may hold another number in the next call
            key = settings
            found = _options.get(key)
    if found is None:
        found = Options(*settings)
        found.problems = {}
        with _lock:
            while len(_options) >= _OPTIONS_KEPT:
                _options.popitem(last=False)
            _options[key] = found
    return found


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(part) for part in value)
    return value is None or isinstance(value, (int, float, str))


def checked(given: Settings) -> Settings:
    """Settings of the right types; raises ValueError if one is wrong. Plain code, which torch.compile can follow. What the
    library checks itself is left to it."""
    lengths, rates = pattern(given.segment_lengths, given.dilation_rates)
    return Settings(
        lengths,
        rates,
        flag("is_causal", given.is_causal),
        limits(given.window),
        None if given.scale is None else _number("scale", given.scale),
        _number("dropout_p", given.dropout_p),
        _one_of("combine", given.combine, _lib.COMBINE),
        _one_of("offset", given.offset, _lib.OFFSET),
        flag("dilate_queries", given.dilate_queries),
        _one_of("layout", given.layout, _lib.LAYOUT),
        _one_of("query_placement", given.query_placement, _lib.PLACEMENT),
        _one_of("schedule", given.schedule, _lib.SCHEDULE),
        _count("bucket", given.bucket, 2**63 - 1),
        _count("threads", given.threads, 2**31 - 1),
        _positive("timeout", given.timeout),
        _positive("call_timeout", given.call_timeout),
        _name("kernel", given.kernel),
        flag("enable_memory_pool", given.enable_memory_pool),
        flag("use_pattern_cache", given.use_pattern_cache),
    )


def flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, int)) or value is None:
        return bool(value)
    try:
        if hasattr(value, "__bool__"):  # strings and lists have none: they are true unless empty
            return bool(value)
    except (ValueError, RuntimeError):  # several values
        pass
    raise ValueError(f"{name} is {value!r}; it must be True or False")


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float))
    if not is_number and getattr(value, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        remedy = "multiply query by it and give scale=1, or " if name == "scale" else ""
        raise ValueError(f"{name} requires a gradient and would not get one: {remedy}give a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return number


def _positive(name: str, value: Any) -> Optional[float]:
    if value is None:
        return None
    if not _number(name, value) > 0:
        raise ValueError(f"{name} is {value} seconds; it must be positive")
    return float(value)


def _count(name: str, value: Any, most: int) -> int:
    if value is None:
        return 0
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer, or None to choose") from None
    if not 0 <= number <= most:
        raise ValueError(f"{name} is {number}; it must be from 1 to {most}, or None to choose")
    return number


def _name(name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be a name")
    return value or "auto"


def problem_for(options: Options, shape: Shape, warn: bool = True) -> Problem:
    """The problem of a call; made and checked the first time, and warned about if its pattern has holes."""
    found = options.problems.get(shape)
    if found is None:
        found = Problem(options, shape)
        with _lock:
            while len(options.problems) >= _PROBLEMS_KEPT:
                options.problems.pop(next(iter(options.problems)))
            options.problems[shape] = found
    if warn and not found.looked_for_holes:
        found.looked_for_holes = True
        _warn_of_holes(found)
    return found


def rows_problem(layout: str, rows: int) -> Problem:
    """A small dense problem, to ask which of a number of rows each rank holds."""
    options = make_options(Settings(layout=layout))
    return problem_for(options, Shape(_lib.F32, _lib.CPU, 1, rows, rows, 1, 1, 1), warn=False)


def _warn_of_holes(problem: Problem) -> None:
    options, shape = problem.options, problem.shape
    rows = shape.batch * shape.seq_q * shape.heads
    name = (options.segment_lengths, options.dilation_rates, options.combine, options.offset, options.dilate_queries)
    if not options.segment_lengths or not rows or name in _warned:
        return
    holes, about = problem.summary().holes, ""
    seq = max(shape.seq_q, shape.seq_k)
    while holes < 0 and seq > 1:  # too many to count: a shorter sequence shows the share
        seq //= 2
        shorter = shape._replace(seq_q=min(shape.seq_q, seq), seq_k=min(shape.seq_k, seq))
        holes, about = Problem(options, shorter).summary().holes, "about "
        rows = shorter.batch * shorter.seq_q * shorter.heads
    if holes > 0:
        hint = "; dilate_queries=False or offset='residue' leaves none in a full segment" if options.dilate_queries else ""
        warn_once(
            name,
            f"{about}{100 * holes / rows:.1f}% of the query rows (over all heads) have no key in this pattern and come out as "
            f"zero{hint}",
            HolesWarning,
        )


def warn_once(name: tuple[Any, ...], text: str, kind: type[Warning] = UserWarning) -> None:
    """Warns in the caller's line, the first time for each name."""
    if name not in _warned:
        _warned.add(name)
        warnings.warn(text, kind, stacklevel=callers_level())


def callers_level() -> int:
    """The stacklevel at which a warning points to the first frame outside this package and torch."""
    torch = sys.modules.get("torch")
    inside = (_HERE, os.path.dirname(torch.__file__)) if torch is not None and torch.__file__ else (_HERE,)
    level = 1
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


_LIKE: dict[str, dict[str, Any]] = {
    "dense": {"segment_lengths": [0], "dilation_rates": [1]},
    "fkodom": {"combine": "heads", "offset": "branch"},
    "longnet": {"combine": "mix", "offset": "head"},
    "torchscale": {"combine": "mix", "offset": "head-block"},
    "strided": {"offset": "residue"},
}


def like(name: str) -> dict[str, Any]:
    """The settings that reproduce another library, as keyword arguments of ``attention``.

    ``dense``, ``fkodom``, ``longnet`` (as in the paper, and in alexisrozhkov's code), ``torchscale`` or ``strided`` (dilated
    attention of NATTEN with its stride equal to the kernel size). ``dense`` sets the pattern itself; the others take your own
    segment_lengths and dilation_rates.

    >>> import numpy as np, ringattn
    >>> x = np.ones((1, 8, 2, 4), np.float32)
    >>> out = ringattn.attention(x, x, x, segment_lengths=[4, 8], dilation_rates=[1, 2], **ringattn.like("longnet"))
    >>> ringattn.like("longnet")
    {'combine': 'mix', 'offset': 'head'}
    """
    if name not in _LIKE:
        raise ValueError(f"like({name!r}) is unknown; it must be one of {', '.join(_LIKE)}")
    return {key: list(value) if isinstance(value, list) else value for key, value in _LIKE[name].items()}
