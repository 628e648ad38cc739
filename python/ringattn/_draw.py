"""``draw``: a picture of who reads whom."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np

from . import _lib
from ._attention import attention
from ._config import Problem, Settings, Shape, make_options, problem_for
from ._style import EMPTY, QUIET, hop_colour, style


def attended(seq: int, heads: int = 1, kv_heads: Optional[int] = None, **options: Any) -> np.ndarray:
    """How often each query reads each key, ``[heads, queries, keys]``, found by calling the library.

    With q = 0 every key that a query reads has the same weight, and lse is the log of their number; with unit vectors as v the
    result tells which keys they were.
    """
    kv_heads = kv_heads or heads
    queries, keys = np.zeros((1, seq, heads, 1), np.float64), np.zeros((1, seq, kv_heads, 1), np.float64)
    counts = np.zeros((heads, seq, seq))
    for begin in range(0, seq, 256):  # head dims go to 256
        width = min(256, seq - begin)
        value = np.zeros((1, seq, kv_heads, width))
        value[0, np.arange(begin, begin + width), :, np.arange(width)] = 1.0
        out, lse = attention(
            np.broadcast_to(queries, (1, seq, heads, width)).copy(),
            np.broadcast_to(keys, (1, seq, kv_heads, width)).copy(),
            value,
            return_lse=True,
            **options,
        )
        counts[:, :, begin : begin + width] = np.moveaxis(out[0], 1, 0) * np.exp(lse[0])[..., None]
    return np.rint(counts).astype(np.int64)


def draw(
    seq: int = 64,
    heads: int = 4,
    head: Optional[int] = None,
    path: Any = None,
    axes: Any = None,
    ring_size: int = 1,
    segment_lengths: Optional[Sequence[int]] = None,
    dilation_rates: Optional[Sequence[int]] = None,
    **options: Any,
) -> Any:
    """Draws which keys each query reads, with matplotlib: one picture for each head, or of one ``head``.

    Colours say how far a key travels on a ring of ``ring_size`` ranks (0: it is at home), by the library's own plan. Options
    are those of ``ringattn.attention``. ``path`` saves the figure; ``axes`` (one for each head drawn) draws into yours. Returns
    the figure.

    >>> import ringattn
    >>> figure = ringattn.draw(16, heads=2, segment_lengths=[8, 16], dilation_rates=[1, 2], ring_size=2)
    >>> [place.get_title(loc="left") for place in figure.axes]
    ['head 0', 'head 1']
    """
    most = 2048 if ring_size == 1 else 512
    if not 1 <= seq <= most:
        raise ValueError(f"seq is {seq}; a picture {'' if ring_size == 1 else 'of a ring '}needs from 1 to {most} positions")
    if ring_size < 1:
        raise ValueError(f"ring_size is {ring_size}; it must be at least 1")
    options.update(segment_lengths=segment_lengths, dilation_rates=dilation_rates)
    with style("ringattn.draw"):
        counts = attended(seq, heads, **options)
        problem = _problem(seq, heads, options)
        shown = list(range(heads)) if head is None else [head]
        figure, places = _places(len(shown), axes)
        for place, number in zip(places, shown):
            _draw_head(place, number, counts[number], problem, ring_size)
        if ring_size > 1 and axes is None:
            _legend(figure, ring_size)
    if path is not None:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    return figure


def _problem(seq: int, heads: int, options: dict[str, Any]) -> Problem:
    settings = {name: value for name, value in options.items() if name in Settings._fields}
    shape = Shape(_lib.F32, _lib.CPU, 1, seq, seq, heads, options.get("kv_heads") or heads, 1)
    return problem_for(make_options(Settings(**{"schedule": "ring", **settings})), shape, warn=False)


def _places(count: int, axes: Any) -> tuple[Any, list[Any]]:
    """A figure, and where in it each head is drawn."""
    if axes is not None:
        places = list(np.ravel(axes))
        return places[0].figure, places
    import matplotlib.pyplot as plt

    columns = min(4, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.1 * columns, 3.2 * rows + 0.4), squeeze=False, layout="constrained")
    places = list(grid.flat)
    for place in places[count:]:
        place.axis("off")
    return figure, places[:count]


def _palette(ring_size: int) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([hop_colour(hop, ring_size - 1) for hop in range(ring_size)])


def _draw_head(place: Any, head: int, counts: np.ndarray, problem: Problem, ring_size: int) -> None:
    hops = np.ma.MaskedArray(np.zeros(counts.shape, np.int64), mask=True)
    if ring_size == 1:
        hops[counts > 0] = 0
    else:
        for query, key in np.argwhere(counts).tolist():
            hops[query, key] = problem.hops(ring_size, query, key, head)
    place.set_facecolor(EMPTY)
    place.imshow(hops, cmap=_palette(ring_size), vmin=-0.5, vmax=ring_size - 0.5, interpolation="nearest")
    place.grid(False)
    place.spines[:].set_visible(False)
    empty = 1.0 - (counts.sum(1) > 0).mean()
    place.set_title(f"head {head}", fontsize=10)
    if empty:
        place.set_title(f"{100 * empty:.0f}% of rows empty", loc="right", fontsize=8, fontweight="normal", color=QUIET)
    place.tick_params(length=0, labelsize=8)
    if ring_size == 1 or problem.options.layout != "contiguous":
        place.set_xlabel("key", fontsize=9)
        place.set_ylabel("query", fontsize=9)
        return
    shares = [keys[0][2] for _, keys in problem.shards(ring_size)]
    borders = np.cumsum(shares)
    for border in borders[:-1]:
        place.axhline(border - 0.5, color="white", linewidth=1.2)
        place.axvline(border - 0.5, color="white", linewidth=1.2)
    middles = borders - np.array(shares) / 2 - 0.5
    place.set_xticks(middles, range(ring_size))
    place.set_yticks(middles, range(ring_size))
    place.set_xlabel("rank of the key", fontsize=9)
    place.set_ylabel("rank of the query", fontsize=9)


def _legend(figure: Any, ring_size: int) -> None:
    from matplotlib.patches import Patch

    colours = _palette(ring_size).colors
    marks = [
        Patch(color=colours[hops], label="at home" if not hops else f"{hops} hop{'s' * (hops > 1)}")
        for hops in range(ring_size)
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=min(8, ring_size), handlelength=1.0, handleheight=1.0)
