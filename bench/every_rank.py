#!/usr/bin/env python3
"""Every rank of a job that is too large for this machine, one after the other, forward and backward: are sampled rows right, is the
peak of memory the planned one, how long does it take?

    bench/every_rank.py --out RANKS.json [--table RANKS.md]
    bench/every_rank.py --out small.json --device cpu --seq 64000 --ring-size 8 --head-dim 16

By default a billion tokens, dilated, on 64 GPUs of which one is here. A rank's peers are generated (bench --rank), so that nothing
of a network is measured. The file is written after every rank, and a run that was interrupted goes on where it stopped."""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

# What the job is: options of `ringattn bench`, and what they default to.
JOB = {
    "seq": "1000000000",
    "ring-size": "64",
    "heads": "3",
    "head-dim": "64",
    "segment-lengths": "2048,4096,8192",
    "dilation-rates": "1,2,4",
    "dtype": "bf16",
    "layout": "contiguous",
    "device": "cuda",
}


def options(job):
    words = [word for name, value in job.items() if name != "causal" for word in ("--" + name, value)]
    return [*words, "--causal"] if job["causal"] else words


def ask(program, *words):
    """The JSON of a command that may find something wrong (exit 1), but must run."""
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{program} {' '.join(map(str, words))}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def machine(program, device):
    found = ask(program, "info", "--json")
    gpus = ", ".join(gpu["name"] for gpu in found["gpus"])
    return gpus if device == "cuda" and gpus else f"{platform.machine()}, {found['cores']} cores, kernel {found['kernel']}"


def play(program, job, rank, repeat):
    started = time.monotonic()
    found = ask(program, "bench", *options(job), "--pass", "both", "--rank", rank, "--repeat", repeat, "--json")
    kept = ("rank", "pairs", "peak_bytes", "planned_bytes", "sampled_rows", "worst", "failed", "fwd", "bwd")
    row = {name: found[name] for name in kept}
    return row | {"kernel": found.get("path", found["kernel"]), "wall_s": round(time.monotonic() - started, 2)}


# ------------------------------------------------------------------------------------------------------------------- the table


def table(result):
    """The page of a result, in Markdown."""
    job, rows = result["job"], result["ranks"]
    ranks, seconds = int(job["ring-size"]), {p: sum(row[p]["ms"] for row in rows) / 1e3 for p in ("fwd", "bwd")}
    right = sum(not row["failed"] for row in rows)
    worst = {name: max(row["worst"][name] for row in rows if name in row["worst"]) for name in rows[0]["worst"]}
    lines = [
        f"# {int(job['seq']):,} tokens on {ranks} ranks, played one by one",
        f"`{' '.join(options(job))}`, on {result['machine']}, {result['date']}, by `{result['made by']}`. A rank's peers are generated; no network is",
        "measured.",
        "",
        "| | |",
        "| --- | --- |",
        f"| ranks played | {len(rows)} of {ranks} |",
        f"| right, with the planned peak of memory | {right} of {len(rows)} |",
        f"| sampled rows a rank | {min(row['sampled_rows'] for row in rows)} or more |",
        f"| worst error of a sampled row | {', '.join(f'{name} {value:.1e}' for name, value in worst.items())} |",
        f"| most memory of a rank | {max(row['peak_bytes'] for row in rows) / 2**30:.2f} GiB |",
        f"| forward, all ranks played (median of {result['repeat']} each) | {seconds['fwd']:.3f} s |",
        f"| backward | {seconds['bwd']:.3f} s |",
        "",
        "| rank | pairs | forward | TFLOP/s | backward | TFLOP/s | sent | peak | planned | rows | right |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        fwd, bwd = row["fwd"], row["bwd"]
        lines.append(
            f"| {row['rank']} | {row['pairs']:.3e} | {fwd['ms']:.2f} ms | {fwd['gflops'] / 1e3:.3g} | {bwd['ms']:.2f} ms "
            f"| {bwd['gflops'] / 1e3:.3g} | {(fwd['bytes_sent'] + bwd['bytes_sent']) / 2**20:.1f} MiB "
            f"| {row['peak_bytes'] / 2**20:.1f} MiB | {row['planned_bytes'] / 2**20:.1f} MiB | {row['sampled_rows']} "
            f"| {'**no**' if row['failed'] else 'yes'} |"
        )
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------------------- the run


def write(path, text):
    """The file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def resumed(path, fresh):
    """What an earlier run left in the file, if it was the same job here."""
    if not path.exists():
        return fresh
    found = json.loads(path.read_text(encoding="utf-8"))
    old, new = ({**run["job"], "machine": run["machine"], "repeat": run["repeat"]} for run in (found, fresh))
    for name, value in new.items():
        if old.get(name) != value:
            sys.exit(f"{path} holds another run, where {name} is {old.get(name)} and not {value}: take another file")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="JSON, to which every rank is added")
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="the table, in Markdown (else on the terminal)")
    parser.add_argument("--program", default="build/ringattn", help="default %(default)s")
    parser.add_argument("--repeat", type=int, default=3, help="calls of each pass that are timed, default %(default)s")
    parser.add_argument("--causal", action="store_true")
    for name, value in JOB.items():
        parser.add_argument("--" + name, default=value, help=f"default {value}")
    given = parser.parse_args()
    job = {name: getattr(given, name.replace("-", "_")) for name in (*JOB, "causal")}
    result = {
        "job": job,
        "machine": machine(given.program, job["device"]),
        "repeat": given.repeat,
        "date": time.strftime("%Y-%m-%d"),
        "made by": " ".join(["bench/every_rank.py", *sys.argv[1:]]),
        "ranks": [],
    }
    result = resumed(given.out, result)
    done = {row["rank"] for row in result["ranks"]}
    for rank in range(int(job["ring-size"])):
        if rank in done:
            continue
        row = play(given.program, job, rank, given.repeat)
        result["ranks"] = sorted([*result["ranks"], row], key=lambda played: played["rank"])
        write(given.out, json.dumps(result, indent=1) + "\n")
        print(
            f"rank {rank}: forward {row['fwd']['ms']:.2f} ms, backward {row['bwd']['ms']:.2f} ms, {row['sampled_rows']} rows "
            f"{'WRONG, or not the planned memory' if row['failed'] else 'right'}",
            file=sys.stderr,
        )
    text = table(result)
    if given.table:
        write(given.table, text)
    else:
        print(text, end="")
    sys.exit(any(row["failed"] for row in result["ranks"]))


if __name__ == "__main__":
    main()
