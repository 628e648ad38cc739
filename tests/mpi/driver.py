"""Starts jobs of rank.c under an MPI's launcher and judges what their ranks report.

    driver.py WHAT IMPLEMENTATION      WHAT is one of the functions below; IMPLEMENTATION is openmpi or mpich

Environment: MPIRUN (the launcher), MPI_RANK (the program), RINGATTN_MODULE_PATH, RINGATTN_LONG=1 for the whole matrix.
Exit status 0: all as it should be; 1: not; 77: skipped, with the reason on stdout.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

IMPLEMENTATION = sys.argv[2] if len(sys.argv) > 2 else "openmpi"
LONG = os.environ.get("RINGATTN_LONG") == "1"


class Job:
    """One mpirun, its ranks' results in files of their own."""

    all = []

    def __init__(self, directory, ranks, *arguments, timeout=1.0, launcher=(), prefix=()):
        self.name = f"{ranks} ranks, {' '.join(map(str, arguments))}"
        self.ranks, self.timeout = ranks, timeout
        self.result = pathlib.Path(tempfile.mkdtemp(dir=directory)) / "result"
        environment = dict(os.environ, RESULT=str(self.result), TIMEOUT=str(timeout))
        self.log = open(self.result.with_name("log"), "w+", encoding="utf-8", errors="replace")
        command = [*prefix, os.environ["MPIRUN"]]
        if IMPLEMENTATION == "openmpi":
            # Many jobs on few cores, as root in containers; a rank's death is the ranks' business.
            command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--enable-recovery"]
        else:
            command += ["-disable-auto-cleanup"]
        command += [*launcher, "-n", str(ranks)]
        if IMPLEMENTATION == "mpich" and "kill" in arguments:
            # Hydra 4.0 kills the survivors of a rank that a signal has ended, now and then in spite of -disable-auto-cleanup. A shell
            # in between turns the signal into an exit status.
            command += ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh"]
        command += [os.environ["MPI_RANK"], *map(str, arguments)]
        self.started = time.monotonic()
        Job.all.append(self)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                        env=environment, start_new_session=True)

    def report(self, rank):
        try:
            return json.loads(pathlib.Path(f"{self.result}.{rank}").read_text())
        except FileNotFoundError:
            return None

    def finish(self, waited_for=None, limit=60.0):
        """Waits for the ranks that should report, ends whatever is left, and returns the reports by rank."""
        waited_for = range(self.ranks) if waited_for is None else waited_for
        deadline = self.started + limit
        while time.monotonic() < deadline and any(self.report(rank) is None for rank in waited_for):
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        self.end_stopped(set(range(self.ranks)) - set(waited_for))
        try:
            self.process.wait(timeout=max(10.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end_stopped(set(range(self.ranks)))
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()
        return {rank: self.report(rank) for rank in range(self.ranks)}

    def end_stopped(self, ranks):
        for rank in ranks:
            try:
                os.kill(int(pathlib.Path(f"{self.result}.{rank}.pid").read_text()), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError, ValueError):
                pass

    def text(self):
        lines = self.result.with_name("log").read_text(errors="replace").splitlines()
        return "\n".join(["    " + line for line in lines[-15:]])


def fail(job, reason):
    print(f"FAILED: {IMPLEMENTATION}, {job.name}: {reason}\n{job.text()}")
    sys.exit(1)


def all_well(job, limit=120.0):
    """Every rank reports RA_OK, and the launcher is content."""
    reports = job.finish(limit=limit)
    for rank, report in reports.items():
        if report is None or report["status"] != "RA_OK":
            fail(job, f"rank {rank} reports {report}")
    if job.process.returncode != 0:
        fail(job, f"the launcher returned {job.process.returncode}")
    return reports


def note(reports):
    return reports[0]["note"]


def messages(directory):
    for ranks in (1, 2, 3, 4, 7):
        print(f"{ranks} ranks: {note(all_well(Job(directory, ranks, 'messages')))}, all whole and in place")


def attention(directory):
    cases = 1000 if LONG else 150
    for ranks in (2, 3, 4, 7):
        print(f"{ranks} ranks: {note(all_well(Job(directory, ranks, 'attention', cases), limit=600))}, the same bits as over threads")


def judge(job, victim, how):
    survivors = [rank for rank in range(job.ranks) if rank != victim or how == "error"]
    reports = job.finish(waited_for=survivors, limit=job.timeout + 20)
    for rank in survivors:
        report = reports[rank]
        if report is None:
            fail(job, f"rank {rank} does not return")
        expected = ("RA_NOMEM",) if how == "error" else ("RA_TIMEOUT", "RA_PEER_LOST")
        if report["status"] not in expected or f"rank {victim} " not in report["sentence"]:
            fail(job, f"rank {rank} reports {report}")
        if "step " not in report["sentence"] or not any(phase in report["sentence"] for phase in ("forward", "backward")):
            fail(job, f"rank {rank} does not name step and phase: {report}")
        if report["seconds"] > job.timeout + 1 + 0.5:  # half a second for the work before the fault, on two cores for many ranks
            fail(job, f"rank {rank} returned only after {report['seconds']} s")
    return len({reports[rank]["sentence"] for rank in survivors}) == 1


def faults(directory):
    """Every rank fails at every step of forward and backward, in every way."""
    sizes = (2, 3, 4) if LONG else (3,)
    matrix = [(ranks, victim, step, how, direction)
              for ranks in sizes for victim in range(ranks) for step in range(ranks)
              for how in ("kill", "stop", "error") for direction in ("forward", "backward")
              if LONG or (victim + step) % 3 == 0 or how == "error"]
    counts, alike, at_once = {}, 0, 3
    for begin in range(0, len(matrix), at_once):
        jobs = [(Job(directory, ranks, "fault", victim, step, how, direction), victim, how)
                for ranks, victim, step, how, direction in matrix[begin:begin + at_once]]
        for job, victim, how in jobs:
            alike += judge(job, victim, how)
            counts[how] = counts.get(how, 0) + 1
    print(f"{len(matrix)} jobs ({', '.join(f'{count} {how}' for how, count in counts.items())}): no survivor hangs, all name the "
          f"right rank; in {alike} of them with the very same sentence")


def alarms(directory):
    """No false alarm: a rank that does nothing at all for 0.8 of the timeout, and one that computes for ten times the timeout."""
    rounds = 50 if LONG else 12
    print(f"{note(all_well(Job(directory, 3, 'pause', 0.8, rounds, timeout=1.0), limit=300))} with one rank paused for 0.8 of the "
          "timeout: no alarm")
    all_well(Job(directory, 3, "busy", 5.0, timeout=0.5))
    print("a step of ten times the timeout: no alarm")
    all_well(Job(directory, 3, "late", 2.5, timeout=0.5))
    print("a rank that arrives late is waited for")


def nomem(directory):
    print(f"{note(all_well(Job(directory, 2, 'nomem'), limit=300))} to open a communicator for want of memory: known on all ranks, "
          "nothing leaked")


def big(directory):
    if not LONG:
        print("skipped: a message over 2 GiB takes 6 GiB of memory; RINGATTN_LONG=1 runs it")
        sys.exit(77)
    seconds = all_well(Job(directory, 2, "big", timeout=60), limit=300)[1]["seconds"]
    print(f"a message of 2.5 GiB arrived whole, after {seconds:.1f} s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ringattn-mpi-") as temporary:
        try:
            globals()[sys.argv[1]](temporary)
        finally:  # whatever happened, no process stays behind
            for left in Job.all:
                if left.process.poll() is None:
                    left.end_stopped(range(left.ranks))
                    left.finish(limit=0.0)
