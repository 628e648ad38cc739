"""How pictures look: one palette and one set of matplotlib's parameters for ``draw`` and ``ringattn.plot``."""

from __future__ import annotations

from typing import Any

INK, QUIET, EMPTY = "#202124", "#80868b", "#f1f3f4"
COLOURS = ("#0b57d0", "#d95f02", "#1b9e77", "#b0307d", "#7a5195", "#a6761d", "#5f6368")  # told apart in grey, too
HOPS = ("#005fd7", "#d75f00", "#00af87", "#af0087", "#d7af00", "#875faf", "#5fafd7", "#626262")  # as `ringattn draw` has them


def hop_colour(hop: int, most: int) -> str:
    """The colour of a hop when there are at most ``most``, by the rule of ``ringattn draw``."""
    if most < len(HOPS):
        return HOPS[hop]
    return HOPS[0 if hop == 0 else 1 + (hop - 1) * (len(HOPS) - 1) // most]


PARAMETERS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.size": 10,
    "grid.color": "#e4e7ea",
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "text.color": INK,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.color": QUIET,
    "ytick.labelcolor": INK,
}


def style(who: str) -> Any:
    """A context in which pictures are made; raises ImportError for ``who`` where there is no matplotlib."""
    try:
        from cycler import cycler
        from matplotlib import rc_context
    except ImportError:
        raise ImportError(f"{who} needs matplotlib, which is not installed") from None
    return rc_context({**PARAMETERS, "axes.prop_cycle": cycler(color=COLOURS)})
