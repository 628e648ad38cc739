#!/usr/bin/env python3
"""Ranks on a GPU are killed and stopped at every step, by every lane, two and three real processes of mpirun: nobody hangs,
everybody names the lost rank, no result looks like one, and the survivors' device computes on.

    tests/gpu/faults.py [--jobs 8] [--seconds 140] [--lanes ipc,staged,nccl] [--few]

RINGATTN_NCCL names NCCL, if it is not found, RINGATTN_LIBRARY the library, RINGATTN_MODULE_PATH where its modules are (with the stand-in among them there needs to be
no GPU). RINGATTN_LONG=1: twice as many steps. Exit status 1 if a job fails, or if --seconds were not enough for all."""

import argparse
import itertools
import os
import pathlib
import shutil
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "mpi")]
import driver  # noqa: E402
import nccl  # noqa: E402

driver.IMPLEMENTATION = "openmpi"
LANES = {name: f"payload between processes {said}" for name, said in (
    ("ipc", "goes by IPC"), ("staged", "is staged in pinned memory"), ("nccl", "goes by NCCL"))}  # fmt: skip
TIMEOUT = 1.5
BUCKETS = 2 if os.environ.get("RINGATTN_LONG") == "1" else 1


def matrix(lanes):
    """(lane, ranks, victim, step, how, pass). Every bucket of a ring has as many steps as ranks, and backward one more in the
    end; step -1: when the hosts may be through."""
    for ranks in (2, 3):
        for name in ("forward", "backward"):
            steps = range(-1, BUCKETS * ranks + (name == "backward"))
            for step, victim, lane, how in itertools.product(steps, range(ranks), lanes, ("kill", "stop")):
                yield lane, ranks, victim, step, how, name


def few():
    yield "ipc", 2, 1, 1, "kill", "forward"
    yield "staged", 3, 0, 2, "stop", "backward"
    yield "ipc", 2, 0, -1, "stop", "backward"
    if nccl.find():
        yield "nccl", 3, 1, -1, "kill", "backward"


def start(directory, rows, lane, ranks, victim, step, how, name):
    variables = {"RINGATTN_LANE": "" if lane == "ipc" else lane, "RINGATTN_DEBUG": "info", "OMP_NUM_THREADS": "1"}
    variables |= {"ROWS": str(rows), "BUCKETS": str(BUCKETS), "RINGATTN_NCCL": nccl.find() or ""}
    arguments = (HERE / "faults_worker.py", victim, step, how, name)
    return driver.Job(directory, ranks, *arguments, timeout=TIMEOUT, program=sys.executable, variables=variables)


def judge(job, lane, victim, how):
    """What is wrong, or None."""
    try:
        driver.judge(job, victim, how)
        for rank in range(job.ranks):
            if rank != victim and job.report(rank)["note"] != "its device computes on":
                driver.fail(job, f"rank {rank} reports {job.report(rank)}")
            if f"rank {rank}: {LANES[lane]}" not in job.all_text():
                driver.fail(job, f"rank {rank} did not use the lane {lane}")
    except SystemExit:
        return True
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8, help="at once, default %(default)s")
    parser.add_argument("--seconds", type=float, default=140, help="no job is started after so long, default %(default)s")
    parser.add_argument("--rows", type=int, default=2048, help="of a rank, default %(default)s")
    parser.add_argument("--lanes", default="ipc,staged" + (",nccl" if nccl.find() else ""), help="default %(default)s")
    parser.add_argument("--few", action="store_true", help="a few jobs only")
    options = parser.parse_args()
    os.environ.setdefault("MPIRUN", shutil.which("mpirun.openmpi") or shutil.which("mpirun") or "")
    if not os.environ["MPIRUN"]:
        print("skipped: there is no mpirun")
        sys.exit(77)
    begin, wanted = time.monotonic(), list(few() if options.few else matrix(options.lanes.split(",")))
    done = failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for first in range(0, len(wanted), options.jobs):
            if time.monotonic() - begin > options.seconds:
                break
            batch = wanted[first : first + options.jobs]
            for job, fault in [(start(directory, options.rows, *fault), fault) for fault in batch]:
                failed += judge(job, fault[0], fault[2], fault[4])
                done += 1
    print(
        f"{done} of {len(wanted)} jobs in {time.monotonic() - begin:.0f} s, {failed} failed; in the others no survivor hangs, all "
        "name the right rank, no result looks like one, and their devices compute on"
    )
    sys.exit(failed > 0 or done < len(wanted))


if __name__ == "__main__":
    main()
