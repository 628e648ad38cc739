#!/usr/bin/env python3
"""What `ringattn plan --machine` predicts beside what `ringattn bench` measures: rings whose ranks share one GPU, offload, and ranks
of large jobs that are played alone.

    bench/forecast.py --out NAME            (measures, prints a page, writes NAME.json)
    bench/forecast.py --from NAME.json      (predicts again what was measured before)

Some numbers of the model come from cases that are here, too; they are marked, and do not count for its error. What one GPU cannot
show is not here: NVLink and networks."""

import argparse
import json
import subprocess
import sys
import time

DENSE = {"seq": 65536, "heads": 16, "head-dim": 128}
NARROW = {"seq": 65536, "heads": 16, "head-dim": 64}
LONG = {"seq": 262144, "heads": 8, "head-dim": 64}
DILATED = {"segment-lengths": "2048,4096,8192", "dilation-rates": "1,2,4"}
BILLION = {"seq": 1000000000, "heads": 3, "head-dim": 64, **DILATED, "ring-size": 64}
FULL, CAUSAL = {"layout": "contiguous"}, {"layout": "zigzag", "causal": True}
RING = {"schedule": "ring", "bucket": 8192}


def cases():
    """(group, machine, options of plan and bench, options of bench alone)"""
    for shape in (DENSE, NARROW):
        for mask in (FULL, CAUSAL):
            yield "one rank", "h200", {**shape, **mask}, {}
    for ranks in (2, 4, 8):
        for shape in (DENSE, NARROW):
            for mask in (FULL, CAUSAL):
                if shape is DENSE or ranks == 4:
                    yield "ring", "h200", {**shape, **mask, "ring-size": ranks, **RING}, {}
    yield "offload", "h200", {**LONG, "causal": True, "offload": True}, {}
    yield "offload", "h200", {**LONG, "offload": True}, {}
    for rank in (0, 31):
        yield "played", "h200x64", BILLION, {"rank": rank}
    yield "played", "h200x64", {**BILLION, "seq": 1 << 30}, {"rank": 17}  # segments inside shards
    yield "played", "h200x64", {**BILLION, "seq": 1 << 27, "ring-size": 16, "combine": "mix"}, {"rank": 5}  # all rows have a state
    yield "played", "h200x64", {**DENSE, **CAUSAL, "seq": 262144, "ring-size": 8, **RING}, {"rank": 3}


def is_source(row):
    """Do numbers of the model come from this case?"""
    parts = {"ring-size": 2, "layout": "contiguous"}, {"combine": "mix"}, {"ring-size": 64, "seq": 1 << 30}
    return row["group"] == "one rank" or any(part.items() <= row["options"].items() for part in parts)


def words(options):
    """The options of a case."""
    options = {"device": "cuda", "dtype": "bf16", **options}
    return [word for name, value in options.items() for word in (["--" + name] if value is True else ["--" + name, str(value)])]


def ask(program, *line):
    """The JSON of a command; bench of a rank exits with 1 if a row is wrong."""
    line = [program, *line, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}: {done.stderr.strip() or 'a row is wrong'}")
    return json.loads(done.stdout)


def predict(program, row):
    """ms of the row's pass: of its rank, or of the slowest."""
    planned = ask(program, "plan", *words(row["options"]), "--machine", row["machine"], "--pass", row["pass"])
    return planned["ranks"][row["rank"]]["predicted_ms"] if "rank" in row else planned["predicted_ms"]


def measure(wanted):
    for group, machine, options, more in cases():
        if group not in wanted.groups.split(","):
            continue
        options = {**options, "seq": wanted.seq} if wanted.seq else options
        how = "--pass", wanted.passes, "--repeat", str(wanted.repeat)
        found = ask(wanted.program, "bench", *words({**options, **more}), *how)
        for name in ("fwd", "bwd"):
            if name in found:
                yield {"group": group, "machine": machine, "options": options, **more, "pass": name, "measured_ms": found[name]["ms"]}


def text(row):
    options = dict(row["options"])
    shown = f"n={options.pop('seq')} h={options.pop('heads')} D={options.pop('head-dim')}"
    shown += f" p={options['ring-size']}" if "ring-size" in options else ""
    shown += "".join(f" {name}" for name in ("causal", "offload") if options.get(name))
    shown += " dilated" if "dilation-rates" in options else ""
    shown += " mixed" if "combine" in options else ""
    return shown + (f" rank {row['rank']}" if "rank" in row else "")


def page(rows):
    lines = ["| | case | pass | predicted ms | measured ms | ratio |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        numbers = f"{row['predicted_ms']:.4g} | {row['measured_ms']:.4g} | {row['predicted_ms'] / row['measured_ms']:.2f}"
        lines.append(f"| {row['group']}{' (source)' if is_source(row) else ''} | {text(row)} | {row['pass']} | {numbers} |")
    checked = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows if not is_source(row)]
    inside = [f"{sum(error <= bound for error in checked)} are within {100 * bound:.0f} %" for bound in (0.15, 0.10)]
    return "\n".join([*lines, "", f"Of the {len(checked)} cases from which no number of the model comes, {' and '.join(inside)}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/ringattn", help="default %(default)s")
    parser.add_argument("--groups", default="one rank,ring,offload,played", help="default %(default)s")
    parser.add_argument("--pass", dest="passes", default="both", choices=("fwd", "bwd", "both"), help="default %(default)s")
    parser.add_argument("--repeat", type=int, default=3, help="default %(default)s")
    parser.add_argument("--seq", type=int, help="of all cases, to try the script where nothing is fast")
    parser.add_argument("--from", dest="file", metavar="FILE", help="takes the measured times from this file")
    parser.add_argument("--out", metavar="NAME", help="writes NAME.json")
    options = parser.parse_args()
    if options.file:
        with open(options.file, encoding="utf-8") as file:
            result = json.load(file)
    else:
        made_by, gpus = " ".join(["bench/forecast.py", *sys.argv[1:]]), ask(options.program, "info")["gpus"]
        result = {"machine": gpus[0]["name"], "date": time.strftime("%Y-%m-%d"), "made by": made_by, "rows": []}
    for row in result["rows"] if options.file else measure(options):
        row["predicted_ms"] = predict(options.program, row)
        if not options.file:
            result["rows"].append(row)
        if options.out:
            with open(options.out + ".json", "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
    print(page(result["rows"]))


if __name__ == "__main__":
    main()
