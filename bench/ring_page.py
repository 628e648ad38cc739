"""Goals and tables of rings on one GPU, from what bench/gpu_rings.py wrote; bench/report.py makes the page."""

EIGHT = {"ranks": 8}
USUAL_BUCKETS = {"full": 8192, "causal": 16384}  # rows of a bucket, where nothing else is asked for
# What is to be reached by the worst of the rows: sentence, group, what a row of it is like, the field, the bound, and whether
# that is the least or the most.
GOALS = (
    ("8 ranks against one, forward, full", "ring", {**EIGHT, "pass": "forward", "pattern": "full"}, "against_one", 0.95, min),
    ("8 ranks against one, forward, causal", "ring", {**EIGHT, "pass": "forward", "pattern": "causal"}, "against_one", 0.93, min),
    ("8 ranks against one, backward", "ring", {**EIGHT, "pass": "backward"}, "against_one", 0.90, min),
    ("time at a slow lane against that of a fast one, 4 ranks", "slow lane", {"alone": False}, "ratio", 1.08, max),
    ("the same of a rank that has the GPU for itself", "slow lane", {"alone": True}, "ratio", 1.08, max),
    ("two processes against two ranks of one", "processes", {}, "ratio", 0.90, min),
)
HOST_US = 50  # of a rank's host, a step
ERROR = 1.25  # of 8 ranks over that of one


def is_rings(result):
    return result.get("what") == "rings"


def alike(rows, group, wanted):
    return [row for row in rows if row["group"] == group and all(row.get(name) == value for name, value in wanted.items())]


def has_usual_bucket(row):
    return row["group"] != "ring" or row["bucket"] == USUAL_BUCKETS[row["pattern"]]


def goals(rows):
    rows = [row for row in rows if has_usual_bucket(row)]
    for text, group, wanted, field, bound, worst in GOALS:
        part = [row[field] for row in alike(rows, group, wanted)]
        if part:
            reached = worst(part)
            met = reached >= bound if worst is min else reached <= bound
            yield text, f"{bound:.2f}x" + (" at most" if worst is max else ""), f"{reached:.3f}x", met
    part = [row["host_us"] for row in alike(rows, "ring", {}) if row["ranks"] > 1]
    if part:
        yield "time of a rank's host, a step", f"{HOST_US} us at most", f"{max(part):.0f} us", max(part) <= HOST_US
    part = alike(rows, "memory", {})
    if part:
        yield how_many("memory of a rank, as planned", [row["measured_bytes"] == row["planned_bytes"] for row in part])
        part = [row for row in part if row["device_total"]]
        if part:
            yield how_many("memory of all ranks by the driver, within 1 %", [is_near_plan(row) for row in part])
    part = [ratio for pattern in ("full", "causal") for ratio in error_ratios(rows, pattern)]
    if part:
        yield "error of 8 ranks over that of one", f"{ERROR:.2f}x at most", f"{max(part):.2f}x", max(part) <= ERROR


def how_many(text, met):
    return text, f"{len(met)} of {len(met)}", f"{sum(met)} of {len(met)}", all(met)


def is_near_plan(row):
    return abs(row["device_total"] - row["planned_total"]) <= 0.01 * row["planned_total"] + row["granularity"]


def error_ratios(rows, pattern):
    one, eight = (alike(rows, "error", {"pattern": pattern, "ranks": ranks}) for ranks in (1, 8))
    return [eight[0]["rms"][name] / one[0]["rms"][name] for name in one[0]["rms"]] if one and eight else []


# -------------------------------------------------------------------------------------------------------------------- tables

MIB = 2**20


def cells_of_ring(row):
    yield str(row["bucket"]) if row["ranks"] > 1 else "-"
    yield from (f"{row['ms']:.1f}", f"{row['tflops']:.0f}", f"{row['against_one']:.3f}x", f"{row['bytes_sent'] / MIB:.0f}")
    yield from (str(row["steps"]), f"{row['host_us']:.0f}")


def cells_of_slow(row):
    yield from ("one rank alone" if row["alone"] else "all ranks", f"{row['rate']:.1f}", f"{row['compute_ms']:.1f}")
    yield from (f"{row['ms']:.1f}", f"{row['ratio']:.3f}x")


def cells_of_memory(row):
    yield from (f"{row['planned_bytes'] / MIB:.1f}", f"{row['measured_bytes'] / MIB:.1f}")
    yield f"{row['planned_total'] / MIB:.1f}"
    yield f"{row['device_total'] / MIB:.1f}" if row["device_total"] else "-"


# A group: title, what it is, heads of the columns after those that tell the case, and its cells.
TABLES = {
    "ring": (
        "Ranks of one process",
        "All ranks share the GPU, so that a ring has as much to compute as one rank; it costs messages, more and smaller\n"
        "steps, and sums in float32 between them. MiB are sent by the rank that sends most; host: of a step, in microseconds.",
        ("bucket", "ms", "TFLOP/s", "against one rank", "MiB sent", "steps", "host"),
        cells_of_ring,
    ),
    "slow lane": (
        "A slow network",
        "Arrivals are held back so that a step's messages take 0.8 of its time. All ranks share the GPU, or one rank alone has\n"
        "it for itself, and its peers' rows are made there.",
        ("on the GPU", "GB/s", "ms, fast lane", "ms", "against fast"),
        cells_of_slow,
    ),
    "processes": (
        "Processes that share the GPU",
        "By CUDA IPC, beside ranks of one process. The GPU gives processes turns of its time; what that costs by itself is the\n"
        "last column: what it does for two processes that know nothing of each other, over what it does for one.",
        ("ms of processes", "ms of one process", "against one process", "turns alone"),
        lambda row: (f"{row['ms']:.1f}", f"{row['threads_ms']:.1f}", f"{row['ratio']:.3f}x", f"{row['slicing']:.3f}x"),
    ),
    "memory": (
        "Memory of a rank",
        "Tensors and workspace, forward and backward, in MiB, of the rank that has most; and of all ranks, as planned and by\n"
        "how much less the driver has free.",
        ("planned", "measured", "all, planned", "all, by the driver"),
        cells_of_memory,
    ),
    "error": (
        "Error",
        "RMS of the difference to float64, of one head.",
        ("out", "dq", "dk", "dv"),
        lambda row: (f"{row['rms'][name]:.3e}" for name in ("out", "dq", "dk", "dv")),
    ),
}


def table(rows, heads, cells):
    passes = any("pass" in row for row in rows)
    heads = ["pattern", "ranks", *(["pass"] if passes else []), *heads]
    yield from ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for row in rows:
        case = [row["pattern"], str(row["ranks"]), *([row["pass"]] if passes else [])]
        yield "| " + " | ".join([*case, *cells(row)]) + " |"


def tables(rows):
    for group, (title, text, heads, cells) in TABLES.items():
        part = alike(rows, group, {})
        if part:
            yield from ["", f"## {title}", text, "", *table(part, heads, cells)]
