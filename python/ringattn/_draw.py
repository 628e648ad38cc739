"""``draw``: a picture of who reads whom."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np

from ._attention import attention


def attended(seq: int, heads: int = 1, kv_heads: Optional[int] = None, **options: Any) -> np.ndarray:
    """How often each query reads each key, ``[heads, queries, keys]``: asked of the library itself, key by key.

    With q = 0 every key a query reads has the same weight, and lse = log of their number; v = the unit vectors says which they
    were.
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

    Colours say how far a key travels on a ring of ``ring_size`` ranks with contiguous shards (0: it is at home). Options are
    those of ``ringattn.attention``. ``path`` saves the figure; ``axes`` (one for each head drawn) draws into yours. Returns the
    figure.

    >>> import ringattn
    >>> figure = ringattn.draw(16, heads=2, segment_lengths=[8, 16], dilation_rates=[1, 2])          # doctest: +SKIP
    """
    if not 1 <= seq <= 2048:
        raise ValueError(f"seq is {seq}; a picture needs from 1 to 2048 positions")
    if ring_size < 1:
        raise ValueError(f"ring_size is {ring_size}; it must be at least 1")
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
    except ImportError:
        raise ImportError("ringattn.draw needs matplotlib, which is not installed") from None
    counts = attended(seq, heads, segment_lengths=segment_lengths, dilation_rates=dilation_rates, **options)
    shown = list(range(heads)) if head is None else [head]
    owner = np.repeat(np.arange(ring_size), [seq // ring_size + (rank < seq % ring_size) for rank in range(ring_size)])
    hops = (owner[:, None] - owner[None, :]) % ring_size
    if axes is None:
        columns = min(4, len(shown))
        rows = -(-len(shown) // columns)
        figure, grid = plt.subplots(rows, columns, figsize=(3.2 * columns, 3.2 * rows), squeeze=False)
        places = list(grid.flat)
        for place in places[len(shown) :]:
            place.axis("off")
    else:
        places = list(np.ravel(axes))
        figure = places[0].figure
    palette = ListedColormap(plt.get_cmap("viridis")(np.linspace(0.0, 0.85, ring_size)))
    for place, number in zip(places, shown):
        picture = np.ma.masked_where(counts[number] == 0, hops)
        place.imshow(picture, cmap=palette, vmin=-0.5, vmax=ring_size - 0.5, interpolation="nearest")
        empty = 1.0 - (counts[number].sum(1) > 0).mean()
        place.set_title(f"head {number}" + (f" ({100 * empty:.0f}% rows empty)" if empty else ""), fontsize=9)
        place.set_xlabel("key")
        place.set_ylabel("query")
    if ring_size > 1 and axes is None:
        marks = figure.colorbar(places[0].images[0], ax=places, ticks=range(ring_size), shrink=0.8)
        marks.set_label("hops on the ring")
    if path is not None:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    return figure
