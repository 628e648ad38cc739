#!/usr/bin/env python3
"""The page of a machine, goals and results, from the JSON that the benches write; with -o its plot, too.

    bench/report.py RESULTS.json ...                the page, on the terminal
    bench/report.py RESULTS.json ... -o PAGE.md     PAGE.md, and PAGE.png where matplotlib is installed

The pages in bench/results:

    bench/report.py bench/results/h200.json bench/results/h200-backward*.json bench/results/h200-few.json \
        bench/results/h200-dims.json bench/results/h200-layer.json -o bench/results/h200.md
    bench/report.py bench/results/h200-rings*.json -o bench/results/h200-rings.md
    bench/report.py bench/results/cpu.json -o bench/results/cpu.md
    bench/report.py bench/results/neoverse-n1.json -o bench/results/neoverse-n1.md

A file is what bench/gpu_peers.py --out, bench/gpu_rings.py --out, bench/cpu_peers.py --json or bench/transports.py wrote. Several
files of one CPU are several runs: a row then is the median of their ratios, and has a range. A file may give its page a title, and
say how it was made ("note")."""

import argparse
import json
import pathlib
import statistics
import sys

import ring_page

# ------------------------------------------------------------------------------------------------------------------------ GPU

PEERS = ("cuDNN", "FA2", "cuDNN packed", "FA2 packed", "FA4", "FA4 fixed order", "cuDNN split", "FA2 split", "FA4 split")
PEERS += ("Flex", "own dense", "own h=32:32", "own loop at 32768")

# What a group of rows is.
GPU_GROUPS = {
    "dense": ("Dense, forward", "bf16. cuDNN and FA2 (FlashAttention-2) are PyTorch's backends, on contiguous [B, H, N, D]."),
    "views": (
        "Strided views, forward",
        "The kernel alone on every r-th row, in segments of `rows` rows, 12 heads. Peers get views of the same memory.",
    ),
    "dilated": (
        "Dilated, forward",
        "Segments 2048, 4096, 8192 at rates 1, 2, 4. In PyTorch: strided views into SDPA, results copied to their rows.",
    ),
    "own": ("Dilated beside own dense attention", "For each useful flop."),
    "grouped": ("Grouped-query heads", "32 query heads on 4 KV heads, beside 32 on 32."),
    "few": (
        "Few queries against a long cache",
        "Peers get K and V as [B, H, N, D]. packed: queries of heads that share K and V as queries of one head.",
    ),
    "flex": ("FlexAttention", "Compiled, with the pattern as its block mask."),
    "million": ("A million tokens", "Beside a loop over 32768 tokens that takes as long."),
    "backward": (
        "Dense, backward",
        "FA4 is FlashAttention-4. Gradients of ringattn, and of FA4 in a fixed order, have the same bits every time.",
    ),
    "backward views": ("Strided views, backward", "As forward."),
    "dilated backward": (
        "Dilated, backward through autograd",
        "In PyTorch: strided views of the whole tensors, or (split) of the heads of a branch, into SDPA or FA4.",
    ),
    "layer": ("Dilated, forward and backward through autograd", "As above; 14 D flops a pair."),
    "own backward": ("Dilated beside own dense attention, backward", "For each useful flop."),
    "dims": ("Other head dimensions, forward", "As dense."),
    "backward dims": ("Other head dimensions, backward", "As dense."),
    "flex layer": ("FlexAttention, forward and backward", "Compiled, with the dilated pattern as its block mask."),
}

# What is to be reached: sentence, group, words that a case has, words that it lacks, least ratio to the best of the others, or
# of those that are named.
GPU_GOALS = (
    ("dense full D=128, n >= 8192, against cuDNN", "dense", ("D=128",), ("causal", "n=2048"), 0.90),
    ("dense causal D=128, n >= 8192, against cuDNN", "dense", ("D=128", "causal"), ("n=2048",), 0.90),
    ("dense D=64, n >= 8192, against cuDNN", "dense", ("D=64",), ("n=2048",), 0.92),
    ("strided views, rows >= 1024, against cuDNN", "views", (), ("rows=512",), 0.92),
    ("strided views, 512 rows, against cuDNN", "views", ("rows=512",), (), 0.95),
    ("dilated full, against the best way in PyTorch", "dilated", (), ("causal",), 1.05),
    ("dilated causal, against the best way in PyTorch", "dilated", ("causal",), (), 1.25),
    ("dilated against own dense, per useful flop", "own", (), (), 0.90),
    ("one query against a long cache", "few", ("queries=1 ",), (), 0.95),
    ("16 queries against a long cache", "few", ("queries=16 ",), (), 0.95),
    ("causal 1,048,576 tokens against a loop at 32768", "million", (), (), 0.95),
    ("backward, n >= 8192, against the best", "backward", (), ("n=2048",), 0.88),
    ("backward, n >= 8192, against FA4 in a fixed order", "backward", (), ("n=2048",), 0.90, "FA4 fixed order"),
    ("backward on strided views, rows >= 1024, against cuDNN", "backward views", (), ("rows=512",), 1.0, "cuDNN"),
    ("backward on strided views, 512 rows, against cuDNN", "backward views", ("rows=512",), (), 0.95, "cuDNN"),
    ("dilated full, backward, against the best way in PyTorch", "dilated backward", (), ("causal",), 1.8),
    ("dilated causal, backward, against the best way in PyTorch", "dilated backward", ("causal",), (), 2.5),
    ("dilated causal, forward and backward, against the best way in PyTorch", "layer", ("causal",), (), 2.2),
    ("dilated against own dense, backward, per useful flop", "own backward", (), (), 0.85),
    ("causal D=96, 192 and 256, against the best", "dims", ("causal",), (), 1.0),
)


def against(row, *names):
    """The speed of ringattn over that of the fastest of these peers, or of all."""
    others = [rate for name, rate in row["tflops"].items() if name != "ringattn" and (not names or name in names)]
    return row["tflops"]["ringattn"] / max(others) if others else None


def gpu_goals(rows):
    found = []
    for text, group, has, lacks, least, *names in GPU_GOALS:
        part = [row for row in rows if row["group"] == group and all(word in row["case"] for word in has)]
        part = [row for row in part if not any(word in row["case"] for word in lacks)]
        ratios = [ratio for ratio in (against(row, *names) for row in part) if ratio]
        if ratios:
            reached = min(ratios)
            found.append((text, f"{least:.2f}x", f"{reached:.2f}x", reached >= least))
    return found


def gpu_table(rows):
    """TFLOP/s of one group's rows, with the peers that it has."""
    names = ["ringattn"] + [name for name in PEERS if any(name in row["tflops"] for row in rows)]
    lines = ["| " + " | ".join(["case", *names, "against the best"]) + " |", "| --- " * (len(names) + 2) + "|"]
    for row in rows:
        cells = [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "-" for name in names]
        times = f"{against(row):.2f}x" if against(row) else "-"
        lines.append("| " + " | ".join([row["case"], *cells, times]) + " |")
    return lines


def gpu_page(results):
    machine = {name: value for result in results for name, value in result["machine"].items()}
    rows = [row for result in results for row in result["rows"]]
    lines = [f"# {machine['gpu']}: goals and results", "", made(results), "", versions(machine), ""]
    lines += [
        "Rates are TFLOP/s of attended pairs, 4 D flops a pair forward and 10 D backward. All take turns in one process. Times",
        "are the device's, which is kept busy until the host has enqueued a call. A GPU at its power limit slows down, so",
        "compare rates of one row only.",
    ]
    yield from lines
    yield from goal_table(gpu_goals(rows))
    for group, (title, text) in GPU_GROUPS.items():
        part = [row for row in rows if row["group"] == group]
        if part:
            yield from ["", f"## {title}", text, "", *gpu_table(part)]


def versions(machine):
    return ", ".join(f"{name} {value}" for name, value in machine.items() if name != "gpu") + "."


def rings_page(results):
    machine = {name: value for result in results for name, value in result["machine"].items()}
    rows = [row for result in results for row in result["rows"]]
    yield from [f"# {machine['gpu']}: rings of ranks on one GPU", "", made(results), "", versions(machine), ""]
    yield from [
        "{dtype}, n = {n}, {heads} heads, D = {head_dim}; full: dense, contiguous rows; causal: zigzag.".format(**rows[0]),
        "Medians of calls that take turns. One GPU cannot show what NVLink, a network between hosts, or the clocks of several",
        "GPUs do.",
    ]
    yield from goal_table(ring_page.goals(rows))
    yield from ring_page.tables(rows)


def tokens(row):
    return int(row["case"].split("n=")[1].split()[0])


def span(ratios):
    least, most = f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"
    return least if least == most else f"{least} to {most}"


GPU_PANELS = (
    ("dense", "Dense forward", "cuDNN"),
    ("dilated", "Dilated forward", "cuDNN"),
    ("backward", "Dense backward", "FA4"),
)


def gpu_plot(results, path):
    rows = [row for result in results for row in result["rows"]]
    panels = []
    for group, name, peer in GPU_PANELS:
        part = [row for row in rows if row["group"] == group and "D=128 " in row["case"] and "causal" in row["case"]]
        part = [row for row in part if peer in row["tflops"]]
        ratios = [against(row, peer) for row in part]
        if part:
            panels.append((f"{name}: {span(ratios)} of {peer}", part))
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, (title, part) in zip(axes.flat, panels):
        for name, colour in (("ringattn", "C0"), ("FA4", "C3"), ("cuDNN", "C1"), ("FA2", "C2")):
            points = [(tokens(row), row["tflops"][name]) for row in part if name in row["tflops"]]
            if points:
                axis.plot(*zip(*points), marker="o", color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks([tokens(row) for row in part], [f"{tokens(row) // 1024}K" for row in part])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0, 0].set_ylabel("TFLOP/s of attended pairs")
    figure.suptitle(f"Causal attention on one {results[0]['machine']['gpu']}, bf16, D = 128", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------------------ CPU

AGAINST_PYTORCH = ("dense", "causal", "dilated", "dilated-causal")
CPU_GROUPS = {
    "dense": "Dense, against PyTorch",
    "causal": "Causal, against PyTorch",
    "dilated": "Dilated, against the careful way in PyTorch",
    "dilated-causal": "Dilated and causal, against the careful way in PyTorch",
    "own": "Dilated, against own dense attention of as many rows, for each useful flop",
    "scaling": "One head on two threads, against one thread",
    "ranks": "Two ranks of one thread, against one rank of two",
    "transports": "Two processes or threads as ranks, against one rank of two threads",
    "overhead": "A whole call from Python at n = 1, microseconds",
    "threads": "Up to 16 threads, against PyTorch with as many: one run, partly busy cores",
}


def peer(dtype, direction, heads=lambda row: True):
    """Whether a row is one against PyTorch of this type and pass."""
    return lambda row: (
        row["case"] in AGAINST_PYTORCH and row["dtype"] == dtype and row["direction"] == direction and heads(row)
    )


def ranks(threads):
    """Whether a row is one of two ranks, which are threads or not."""
    return lambda row: row["case"] in ("ranks", "transports") and (row.get("over", "threads") == "threads") == threads


# What is to be reached: sentence, which rows it is about, the least ratio (of microseconds: the most).
CPU_GOALS = (
    ("bf16 forward, against PyTorch", peer("bf16", "forward"), 2.0),
    ("bf16 backward, against PyTorch", peer("bf16", "backward"), 3.0),
    (
        "f32 backward, heads >= threads, against PyTorch",
        peer("f32", "backward", lambda row: row["heads"] >= row["threads"]),
        0.95,
    ),
    (
        "f32 backward, one head on two threads, against PyTorch",
        peer("f32", "backward", lambda row: (row["heads"], row["threads"]) == (1, 2)),
        1.7,
    ),
    ("dilated against own dense, per useful flop", lambda row: row["case"] == "own", 0.90),
    ("two ranks against one, threads", ranks(threads=True), 0.93),
    ("two ranks against one, MPI", ranks(threads=False), 0.90),
    ("a whole call at n = 1, microseconds", lambda row: row["case"] == "overhead", 20.0),
)
KEY = ("case", "over", "pattern", "dtype", "heads", "seq", "dim", "threads", "direction")


def merged(results):
    """Rows of all runs: of each kind the median of the ratios, and their range."""
    alike = {}
    for result in results:
        for row in result["rows"]:
            alike.setdefault(tuple(row.get(name) for name in KEY), []).append(row)
    found = []
    for rows in alike.values():
        value = [row["ringattn"] if row["unit"] == "us" else row["ratio"] for row in rows]
        least = min(row.get("least", number) for row, number in zip(rows, value))
        most = max(row.get("most", number) for row, number in zip(rows, value))
        found.append(dict(rows[0], value=statistics.median(value), least=least, most=most))
    return found


def cpu_goals(rows):
    found = []
    for text, belongs, bound in CPU_GOALS:
        part = [row for row in rows if belongs(row)]
        if part and part[0]["unit"] == "us":
            reached = max(row["value"] for row in part)
            found.append((text, f"{bound:.0f} at most", f"{reached:.1f}", reached <= bound))
        elif part:
            reached = min(row["value"] for row in part)
            found.append((text, f"{bound:.2f}x", f"{reached:.2f}x", reached >= bound))
    return found


def cpu_cell(row):
    if row is None:
        return "-"
    if row["unit"] == "us":
        return f"{row['value']:.1f}"
    return f"{row['value']:.2f}x" + (f" ({row['least']:.2f} - {row['most']:.2f})" if row["least"] != row["most"] else "")


FIELDS = {field: field for field in ("over", "pattern", "dtype", "heads", "seq", "dim", "threads")} | {"seq": "n", "dim": "D"}


def cpu_table(rows):
    """A line for each kind of call, a column for each pass; of the group "threads" a column for each number of threads."""
    across = "threads" if rows[0]["case"] == "threads" else "direction"
    fields = [field for field in FIELDS if field != across and any(field in row for row in rows)]
    columns, lines = list(dict.fromkeys(row[across] for row in rows)), {}
    for row in rows:
        lines.setdefault(tuple(str(row.get(field, "")) for field in fields), {})[row[across]] = row
    head = [FIELDS[field] for field in fields] + [f"on {x}" if across == "threads" else x for x in columns]
    yield from ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for key, cells in lines.items():
        yield "| " + " | ".join([*key, *(cpu_cell(cells.get(x)) for x in columns)]) + " |"


def cpu_page(results):
    rows = merged(results)
    machine = results[0]["machine"]
    yield from [f"# {results[0].get('title', machine)}: goals and results", "", made(results), "", machine + ".", ""]
    yield from [
        "Numbers are ratios of speeds, ours over theirs, of calls that take turns in one run: the median, and in brackets the",
        "range over runs. On a shared machine ratios move by a tenth or two.",
    ]
    yield from goal_table(cpu_goals(rows))
    for group, title in CPU_GROUPS.items():
        part = [row for row in rows if row["case"] == group]
        if part:
            yield from ["", f"## {title}", *cpu_table(part)]


def kind(row):
    many = {name: f"{row[name]} {name[:-1] if row[name] == 1 else name}" for name in ("heads", "threads")}
    return f"{row['case']} D={row['dim']}, {many['heads']}, {many['threads']}"


def cpu_plot(results, path):
    rows = [row for row in merged(results) if row["case"] in AGAINST_PYTORCH]
    plt = pyplot()
    types = [dtype for dtype in ("bf16", "f32", "f16") if any(row["dtype"] == dtype for row in rows)]
    kinds = {dtype: list(dict.fromkeys(kind(row) for row in rows if row["dtype"] == dtype)) for dtype in types}
    size = (5.2 * len(types), 1.2 + 0.42 * max(map(len, kinds.values())))
    figure, axes = plt.subplots(1, len(types), figsize=size, squeeze=False)
    for axis, dtype in zip(axes.flat, types):
        spans = []
        for index, direction in enumerate(("forward", "backward")):
            part = [row for row in rows if row["dtype"] == dtype and row["direction"] == direction]
            places = [kinds[dtype].index(kind(row)) + 0.2 * (2 * index - 1) for row in part]
            values = [row["value"] for row in part]
            errors = [[v - row["least"] for v, row in zip(values, part)], [row["most"] - v for v, row in zip(values, part)]]
            thin = {"elinewidth": 0.8, "ecolor": "0.3"}
            axis.barh(places, values, 0.38, label=direction, color=f"C{index}", xerr=errors, error_kw=thin)
            spans.append(f"{span(values)} {direction}")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(kinds[dtype])), kinds[dtype], fontsize=8)
        axis.set_ylim(len(kinds[dtype]) - 0.4, -0.6)
        axis.set_title(f"{dtype}: " + ", ".join(spans), fontsize=9, loc="right")
        axis.set_xlabel("times PyTorch's speed (bars: median, lines: range of runs)", fontsize=8)
    axes[0, 0].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------------------------------------------------------- pages


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def made(results):
    """When and by what; a line for each file."""
    lines = []
    for result in results:
        text = f"{result.get('date', 'Undated')}" + (f", by `{result['made by']}`" if "made by" in result else "")
        lines.append(f"{text}. {result['note']}" if "note" in result else text + ".")
    return "\n".join(f"- {line}" for line in lines) if len(lines) > 1 else lines[0]


def goal_table(goals):
    goals = list(goals)
    if goals:
        yield from ["", "## Goals", "| goal | at least | reached, worst of its rows | met |", "| --- | --- | --- | --- |"]
        for text, bound, reached, met in goals:
            yield f"| {text} | {bound} | {reached} | {'yes' if met else '**no**'} |"


def is_gpu(result):
    return isinstance(result["machine"], dict)


def page(results, picture=None):
    """The text of the page; picture: the name of its plot."""
    make = rings_page if ring_page.is_rings(results[0]) else gpu_page if is_gpu(results[0]) else cpu_page
    lines = list(make(results))
    if picture:
        place = lines.index("## Goals") - 1 if "## Goals" in lines else len(lines)
        lines[place:place] = ["", f"![Ours and theirs]({picture})"]
    return "\n".join(lines) + "\n"


def has_plot(results):
    groups = {row.get("group", row.get("case")) for result in results for row in result["rows"]}
    return bool(groups & ({"dense", "dilated", "backward"} if is_gpu(results[0]) else set(AGAINST_PYTORCH)))


def measure(bench, cases, result, out, after=lambda: None):
    """Runs cases, which are bench's methods, into result, whose rows are bench's, and prints the page. When a case starts, those
    before it are in OUT.json, and after() has run."""
    for case in cases:
        getattr(bench, case)()
        after()
        if out:
            with open(out + ".json", "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
    print("\n" + page([result]))


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="RESULTS.json")
    parser.add_argument("-o", "--output", metavar="PAGE.md")
    options = parser.parse_args()
    results = [read(path) for path in options.files]
    if len({is_gpu(result) for result in results}) > 1:
        sys.exit("results of a GPU and of a CPU do not go into one page")
    if len({ring_page.is_rings(result) for result in results}) > 1:
        sys.exit("results of rings go into a page of their own")
    if not options.output:
        print(page(results))
        return
    output = pathlib.Path(options.output)
    picture = output.with_suffix(".png")
    output.write_text(page(results, picture.name if has_plot(results) else None), encoding="utf-8")
    if has_plot(results):
        try:
            (gpu_plot if is_gpu(results[0]) else cpu_plot)(results, picture)
        except ImportError:
            print(f"{picture} is not drawn: matplotlib is not installed")


if __name__ == "__main__":
    main()
