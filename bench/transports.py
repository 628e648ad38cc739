#!/usr/bin/env python3
"""What it costs to be two ranks: a ring of two ranks with one worker each against one rank with two workers, on two cores.

    bench/transports.py [build/ringattn] [ROUNDS] [RESULTS.json]        (bench/report.py makes a page of the JSON)

Runs alternate, so that a machine whose speed drifts does not favour either; the result is the median of the ratios of their times. A
ratio of 1 means that two ranks are as fast as one. Needs a quiet machine. Targets: 0.90 over MPI at n = 16384, 0.93 over threads at n = 32768.
"""
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time

PROGRAM = sys.argv[1] if len(sys.argv) > 1 else "build/ringattn"
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 3
OUTPUT = sys.argv[3] if len(sys.argv) > 3 else None
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


rows = []


def measure(launcher, *options):
    command = [*launcher, PROGRAM, "bench", "--heads", "2", "--head-dim", "64", "--repeat", "1", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)["fwd"]


def compare(name, seq, launcher, options, pattern):
    ratios, waits = [], []
    for _ in range(ROUNDS):
        one = measure((), "--seq", str(seq), "--threads", "2", *pattern)
        two = measure(launcher, "--seq", str(seq), "--threads", "1", *options, *pattern)
        ratios.append(one["ms"] / two["ms"])
        waits.append(two["wait_ms"] / two["ms"])
    print(f"{name:22} n = {seq}, {'zigzag causal' if pattern else 'dense':13}: {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f}), waiting {100 * statistics.median(waits):.1f} %", flush=True)
    rows.append(dict(case="transports", over=name.split()[0], pattern="zigzag causal" if pattern else "dense", dtype="f32", heads=2,
                     seq=seq, dim=64, threads=1, direction="forward", unit="gflops", ratio=statistics.median(ratios),
                     least=min(ratios), most=max(ratios)))


for shape in ((), ("--causal", "--layout", "zigzag")):
    for mpi in ("openmpi", "mpich"):
        if shutil.which("mpirun." + mpi):
            compare("mpirun." + mpi + " -n 2", 16384, ("mpirun." + mpi, "-n", "2"), (), shape)
    compare("threads", 32768, (), ("--ring-size", "2"), shape)
if OUTPUT:
    result = {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "date": time.strftime("%Y-%m-%d"),
              "made by": " ".join(["bench/transports.py", *sys.argv[1:]]), "rows": rows}
    with open(OUTPUT, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
