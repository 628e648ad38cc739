"""Pictures of the JSON that ``ringattn bench``, ``memory`` and ``plan`` print, and of the benches against other libraries.

    python -m ringattn.plot results.json [more.json ...] [-o picture.png]

A file holds one JSON object, a list of them, or several one after the other (``ringattn bench --json >> results.json``). Each
kind of result becomes a panel: speed, scaling over the ring size, memory with its limit or the 1/p line (a panel for each
dtype), balance of a plan, speed against peers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, Callable, Iterable, Optional

from ._style import QUIET, style

Result = dict[str, Any]


def read(path: Any) -> list[Result]:
    """The results in a file. Raises ValueError with the file's name where it is not what ringattn writes.

    >>> import json, tempfile
    >>> from ringattn import plot
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     _ = file.write(json.dumps({"schema": 1, "command": "memory", "rows": []}) * 2)
    ...     file.flush()
    ...     len(plot.read(file.name))
    2
    """
    text, results, place = pathlib.Path(path).read_text(), [], 0
    decoder = json.JSONDecoder()
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        try:
            value, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        results += value if isinstance(value, list) else [value]
    for result in results:
        if not isinstance(result, dict):
            raise ValueError(f"{path}: holds a {type(result).__name__} where a result is expected")
        if result.get("schema", 1) != 1:
            raise ValueError(f"{path}: schema {result['schema']} is unknown here; 1 is expected")
    return results


def kind(result: Result) -> str:
    """bench, memory, plan or peers: as the result says, or as its fields show."""
    named = result.get("command")
    if named in _PANELS:
        return str(named)
    if "ranks" in result and "balance" in result:
        return "plan"
    rows = result.get("rows")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "reduction" in rows[0]:
        return "memory"
    if _peer_rows(result):
        return "peers"
    if "fwd" in result or "bwd" in result:
        return "bench"
    raise ValueError(f"a result with the fields {', '.join(sorted(result))} is none of {', '.join(_PANELS)}")


# ----------------------------------------------------------------------------------------------------------------------- panels


def _label(result: Result) -> str:
    parts = [result.get("label") or " ".join(str(result[name]) for name in ("kernel", "dtype") if name in result)]
    if "seq" in result:
        parts.append(f"n={result['seq']:,}")
    if result.get("ring_size", 1) != 1:
        parts.append(f"p={result['ring_size']} {result.get('layout', '')}".strip())
    return "\n".join(part for part in parts if part) or "bench"


def _passes(results: Iterable[Result]) -> list[str]:
    return [name for name in ("fwd", "bwd") if any(name in result for result in results)]


_TITLES = {"fwd": "forward", "bwd": "backward"}


def _speed(axes: Any, results: list[Result]) -> None:
    names, passes = [_label(result) for result in results], _passes(results)
    _bars(
        axes,
        names,
        {_TITLES[p]: [result.get(p, {}).get("gflops") for result in results] for p in passes},
        "GFLOP/s, attended pairs only",
    )
    axes.set_title("Speed of useful work")


def _scaling(axes: Any, results: list[Result]) -> None:
    results = sorted(results, key=lambda result: result["ring_size"])
    sizes = sorted({result["ring_size"] for result in results})
    lengths = list(dict.fromkeys(result.get("seq") for result in results))
    for seq in lengths:
        for p in _passes(results):
            points = [(result["ring_size"], result[p]["ms"]) for result in results if p in result and result.get("seq") == seq]
            if points:
                name = _TITLES[p] if len(lengths) == 1 else f"{_TITLES[p]}, n={seq:,}"
                (line,) = axes.plot(*zip(*points), marker="o", label=name)
                _ideal(axes, sizes, points[0], line.get_color())
    _ideal(axes, [], (1, 1), QUIET, "1/p")
    _ring_axis(axes, sizes)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_title("Time over ring size")
    axes.legend()


def _ideal(axes: Any, sizes: list[int], first: tuple[int, float], colour: str, label: Optional[str] = None) -> None:
    """What dividing by the ring size would give, from the first point on."""
    _dashed(axes, sizes, [first[1] * first[0] / size for size in sizes], colour, label)


def _dashed(axes: Any, sizes: list[int], values: list[float], colour: str, label: Optional[str] = None) -> None:
    axes.plot(
        sizes,
        values,
        linestyle=(0, (4, 3)),
        linewidth=1.2,
        color=colour,
        alpha=0.6,
        label=label,
        zorder=1.5,
    )


def _memory(axes: Any, results: list[Result]) -> None:
    rows = [row for result in results for row in result["rows"]]
    sizes = sorted({row["ring_size"] for row in rows})
    for seq in sorted({row["seq"] for row in rows}, reverse=True):
        points = sorted(
            (row["ring_size"], row["peak_bytes"] / 2**20, row.get("planned_bytes")) for row in rows if row["seq"] == seq
        )
        (line,) = axes.plot([p for p, _, _ in points], [peak for _, peak, _ in points], marker="o", label=f"{seq:,} tokens")
        limits = {row["ring_size"]: row.get("limit") for row in rows if row["seq"] == seq}
        if points[0][0] == 1 and all(limit is not None for limit in limits.values()):
            places = sorted(limits)
            _dashed(axes, places, [points[0][1] * (1 - limits[p]) for p in places], line.get_color())
        else:
            _ideal(axes, sizes, points[0][:2], line.get_color())
        planned = [(p, plan / 2**20) for p, _, plan in points if plan]
        if planned:
            axes.plot(*zip(*planned), **_PLANNED, color=line.get_color())
    limited = all(row.get("limit") is not None for row in rows)
    _dashed(axes, [], [], QUIET, "limit" if limited else "1/p")
    axes.plot([], [], **_PLANNED, color=QUIET, label="planned")
    _ring_axis(axes, sizes)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("peak memory of a rank, MiB")
    dtypes = sorted({result["dtype"] for result in results if "dtype" in result})
    axes.set_title("Memory of a rank over ring size" + "".join(f", {dtype}" for dtype in dtypes))
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.35, high)  # the lines leave no corner free
    axes.legend(loc="lower left", ncols=2)


_PLANNED = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.2}


def _balance(axes: Any, results: list[Result]) -> None:
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        ranks = result["ranks"]
        mean = sum(rank["pairs"] for rank in ranks) / max(1, len(ranks)) or 1
        places = [rank["rank"] + (index - (len(results) - 1) / 2) * width for rank in ranks]
        name = f"{result.get('layout', 'plan')} ({100 * result['balance']:.0f}%)"
        axes.bar(places, [rank["pairs"] / mean for rank in ranks], width, label=name)
    axes.axhline(1, linestyle="--", color=QUIET, linewidth=1)
    _rank_axis(axes)
    axes.set_ylabel("pairs, relative to the mean")
    axes.set_title("Work of each rank")
    axes.legend()


def _plan_memory(axes: Any, results: list[Result]) -> None:
    for result in results:
        ranks, layout = result["ranks"], result.get("layout", "plan")
        colour = None
        for field, name, look in (("bytes_sent", "sent", {"marker": "o"}), ("memory_bytes", "memory", {"linestyle": ":"})):
            values = [rank[field] / 2**20 for rank in ranks]
            (line,) = axes.plot([rank["rank"] for rank in ranks], values, label=f"{layout}: {name}", color=colour, **look)
            colour = line.get_color()
    _rank_axis(axes)
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.set_title("Bytes sent and memory of each rank")
    axes.legend()


def _rank_axis(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("rank")


_UNITS = {"tflops": "TFLOP/s", "gflops": "GFLOP/s", "ms": "ms"}


def _unit_of(name: str) -> Optional[str]:
    return next((unit for unit in _UNITS if name == unit or name.endswith("_" + unit)), None)


def _case(row: Result) -> str:
    parts = [str(row[name]) for name in ("case", "name", "dtype") if name in row]
    parts += [f"{short}={row[name]}" for name, short in (("seq", "n"), ("dim", "d"), ("threads", "threads")) if name in row]
    return " ".join(parts + [str(row[name]) for name in ("pass", "direction") if name in row])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rows_of(result: Result) -> list[Result]:
    found: list[Any] = next((result[name] for name in ("cases", "rows", "results") if isinstance(result.get(name), list)), [])
    return [row for row in found if isinstance(row, dict)]


def _peer_rows(result: Result) -> list[tuple[str, str, str, float]]:
    """(case, peer, unit, number) of each measurement, in the first unit that the result has.

    A row is {case, peer: name, gflops}, {case, ringattn_gflops, torch_gflops}, {case, ringattn: {gflops}, torch: {gflops}},
    {case, gflops: {ringattn, torch}}, or {case, ringattn, peer} with plain numbers, which are GFLOP/s unless the result names
    its unit.
    """
    found: list[tuple[str, str, str, float]] = []
    for row in _rows_of(result):
        case = _case(row)
        who = next((row[name] for name in ("peer", "library", "who") if isinstance(row.get(name), str)), None)
        for name, value in row.items():
            unit = _unit_of(name)
            if unit and _is_number(value):
                found.append((case, who or name[: -len(unit) - 1] or "ringattn", unit, float(value)))
            elif isinstance(value, dict):
                for inner, number in value.items():
                    if (unit or inner in _UNITS) and _is_number(number):
                        found.append((case, inner if unit else name, unit or inner, float(number)))
            elif name in ("ringattn", "peer") and _is_number(value):
                found.append((case, name, result.get("unit", "gflops"), float(value)))
    units = [unit for unit in _UNITS if any(row[2] == unit for row in found)]
    return [row for row in found if row[2] == units[0]] if units else []


def _peers(axes: Any, results: list[Result]) -> None:
    rows = [row for result in results for row in _peer_rows(result)]
    cases, peers = list(dict.fromkeys(row[0] for row in rows)), list(dict.fromkeys(row[1] for row in rows))
    table = {(case, peer): number for case, peer, _, number in rows}
    _bars(axes, cases, {peer: [table.get((case, peer)) for case in cases] for peer in peers}, _UNITS[rows[0][2]])
    groups = {str(row["group"]) for result in results for row in _rows_of(result) if "group" in row}
    axes.set_title("Against other libraries" + (f": {groups.pop()}" if len(groups) == 1 else ""))


def _by_group(results: list[Result]) -> list[list[Result]]:
    """Results whose rows are of several groups, one group at a time."""
    groups = list(dict.fromkeys(row.get("group") for result in results for row in _rows_of(result)))
    return [
        [{**result, "rows": [row for row in _rows_of(result) if row.get("group") == group]} for result in results]
        for group in groups
    ]


def _by_dtype(results: list[Result]) -> list[list[Result]]:
    dtypes = list(dict.fromkeys(result.get("dtype") for result in results))
    return [[result for result in results if result.get("dtype") == dtype] for dtype in dtypes]


_APART: dict[str, Callable[[list[Result]], list[list[Result]]]] = {"memory": _by_dtype, "peers": _by_group}


def _bars(axes: Any, names: list[str], groups: dict[str, list[Optional[float]]], unit: str) -> None:
    """Bars that stand, or lie where their names would not fit below them."""
    width = 0.8 / max(1, len(groups))
    lying = max((len(line) for name in names for line in name.splitlines()), default=0) * len(names) > 60
    for index, (group, values) in enumerate(groups.items()):
        places = [place + (index - (len(groups) - 1) / 2) * width for place in range(len(names))]
        (axes.barh if lying else axes.bar)(places, [value or 0.0 for value in values], 0.92 * width, label=group)
    (axes.set_yticks if lying else axes.set_xticks)(range(len(names)), names, fontsize=8)
    axes.grid(axis="y" if lying else "x", visible=False)
    (axes.set_xlabel if lying else axes.set_ylabel)(unit)
    if lying:
        axes.set_ylim(len(names) - 0.4, -0.6)
    axes.legend()


def _ring_axis(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("ring size")


_PANELS: dict[str, Callable[[Any, list[Result]], None]] = {
    "bench": _speed,
    "memory": _memory,
    "plan": _balance,
    "peers": _peers,
}


# ----------------------------------------------------------------------------------------------------------------------- figure


def figure(results: list[Result]) -> Any:
    """A matplotlib figure with a panel for each kind of result."""
    if not results:
        raise ValueError("there are no results to draw")
    with style("ringattn.plot"):
        return _figure(results)


def _figure(results: list[Result]) -> Any:
    from matplotlib.figure import Figure

    kinds: dict[str, list[Result]] = {}
    for result in results:
        kinds.setdefault(kind(result), []).append(result)
    panels: list[tuple[Callable[[Any, list[Result]], None], list[Result]]] = []
    for name in _PANELS:
        if name in kinds:
            panels += [(_PANELS[name], its) for its in (_APART[name](kinds[name]) if name in _APART else [kinds[name]])]
    if len({result.get("ring_size", 1) for result in kinds.get("bench", [])}) > 1:
        panels.append((_scaling, kinds["bench"]))
    if "plan" in kinds:
        panels.append((_plan_memory, kinds["plan"]))
    most = max((len({row[0] for result in its for row in _peer_rows(result)}) for _, its in panels), default=0)
    drawn = Figure(figsize=(5.6 * len(panels), max(4.2, 0.34 * most)), layout="constrained")
    for axes, (panel, its) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels):
        panel(axes, its)
    return drawn


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ringattn.plot", description="Draws the JSON of ringattn bench, memory, plan and peers."
    )
    parser.add_argument("files", nargs="+", help="JSON files")
    parser.add_argument("-o", "--output", help="picture to write (png, svg, pdf); beside the first file by default")
    given = parser.parse_args(arguments)
    output = given.output or pathlib.Path(given.files[0]).with_suffix(".png")
    try:
        results = [result for path in given.files for result in read(path)]
        figure(results).savefig(output, dpi=150)
    except (OSError, ValueError, ImportError) as error:
        print(f"ringattn.plot: {error}", file=sys.stderr)
        return 3
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
