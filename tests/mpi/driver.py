"""Starts jobs of rank.c under an MPI's launcher and judges what their ranks report.

    driver.py WHAT IMPLEMENTATION      WHAT is one of the functions below; IMPLEMENTATION is openmpi or mpich

Environment: MPIRUN (the launcher), MPI_RANK and MPI_OWN (the programs), RINGATTN (the command line), RINGATTN_MODULE_PATH, and
RINGATTN_LONG=1 for the whole matrix.
Exit status 0: all as it should be; 1: not; 77: skipped, with the reason on stdout.
"""

import array
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import patience  # noqa: E402

IMPLEMENTATION = sys.argv[2] if len(sys.argv) > 2 else "openmpi"
LONG = os.environ.get("RINGATTN_LONG") == "1"


class Job:
    """One mpirun, its ranks' results in files of their own."""

    all = []

    def __init__(self, directory, ranks, *arguments, timeout=1.0, launcher=(), prefix=(), program=None, kill=False,
                 variables=None):
        self.name = f"{ranks} ranks, {' '.join(map(str, arguments))}"
        self.ranks, self.timeout = ranks, timeout * patience.factor()
        self.result = pathlib.Path(tempfile.mkdtemp(dir=directory)) / "result"
        # A TMPDIR for each: Open MPI's launchers remove each other's session directories otherwise.
        environment = dict(os.environ, RESULT=str(self.result), TIMEOUT=str(self.timeout), TMPDIR=str(self.result.parent),
                           **(variables or {}))
        self.log = open(self.result.with_name("log"), "w+", encoding="utf-8", errors="replace")
        command = [*prefix, os.environ["MPIRUN"]]
        if IMPLEMENTATION == "openmpi":
            # Many jobs on few cores, as root in containers; a rank's death is the ranks' business.
            command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--enable-recovery"]
        else:
            command += ["-disable-auto-cleanup"]
        command += [*launcher, "-n", str(ranks)]
        if IMPLEMENTATION == "mpich" and (kill or "kill" in arguments):
            # Hydra 4.0 kills the survivors of a rank that a signal has ended, now and then in spite of -disable-auto-cleanup.
            # A shell in between turns the signal into an exit status.
            command += ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh"]
        command += [program or os.environ["MPI_RANK"], *map(str, arguments)]
        self.started = time.monotonic()
        Job.all.append(self)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                        env=environment, start_new_session=True)

    def report(self, rank):
        try:
            return json.loads(pathlib.Path(f"{self.result}.{rank}").read_text())
        except FileNotFoundError:
            return None

    def wait_for_reports(self, until):
        while any(self.report(rank) is None for rank in range(self.ranks)):
            if time.monotonic() > until or self.process.poll() is not None:
                return
            time.sleep(0.01)

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

    def all_text(self):
        return self.result.with_name("log").read_text(errors="replace")

    def text(self):
        lines = self.all_text().splitlines()
        return "\n".join(["    " + line for line in lines[-15:]])


def fail(job, reason):
    raise AssertionError(f"FAILED: {IMPLEMENTATION}, {job.name}: {reason}\n{job.text()}")


def end_jobs():
    """Whatever happened, no process stays behind."""
    for left in Job.all:
        if left.process.poll() is None:
            left.end_stopped(range(left.ranks))
            left.finish(limit=0.0)


def patiently(trial, *arguments):
    """What the trial returns; one that fails on a machine that is late is repeated, with longer timeouts."""
    return patience.repeat(lambda: trial(*arguments), timeout=0.4, between=end_jobs)


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
    for ranks in (2, 3):
        print(f"{ranks} ranks: {note(all_well(Job(directory, ranks, 'openings')))}, nothing mixed up")


def attention(directory):
    cases = 1000 if LONG else 60
    for ranks in (2, 3, 4, 7):
        done = note(all_well(Job(directory, ranks, "attention", cases), limit=600))
        print(f"{ranks} ranks: {done}, the same bits as over threads")


def on_gpus(directory, lane):
    """The environment of ranks that compute on the stand-in for a GPU and exchange payload by this lane."""
    modules, build = pathlib.Path(directory) / "modules", pathlib.Path(os.environ["RA_BUILD"])
    if not modules.exists():
        modules.mkdir()
        for module in (*build.glob("ringattn_mpi_*.so"), build / "tests/stand_in/libringattn_cuda.so"):
            (modules / module.name).symlink_to(module)
    variables = {"RINGATTN_MODULE_PATH": str(modules), "ON_GPU": "1", "RINGATTN_LANE": "" if lane == "ipc" else lane,
                 "RINGATTN_DEBUG": "info"}
    return {**variables, "RINGATTN_NCCL": str(modules / "libringattn_cuda.so")} if lane == "nccl" else variables


def gpus(directory):
    """Ranks on GPUs: the same bits by every lane; where one rank cannot open the others' memory, all stage."""
    cases = 300 if LONG else 8
    for ranks in (2, 3, 4):
        for lane in ("ipc", "nccl", "staged"):
            done = note(all_well(Job(directory, ranks, "attention", cases, variables=on_gpus(directory, lane)), limit=600))
            if not done.endswith(f"cases by {lane}"):
                sys.exit(f"FAILED: {ranks} ranks: {done}, not by {lane}")
            print(f"{ranks} ranks: {done}, the same bits as over threads")
    for lane in ("ipc", "nccl"):
        slow = {**on_gpus(directory, lane), "RINGATTN_STAND_IN_STEP_MS": "10"}  # a call begins before the one before is done
        print(f"3 ranks, slow steps: {note(all_well(Job(directory, 3, 'attention', 5, variables=slow)))}, the same bits")
    for refuser in (0, 2):
        job = Job(directory, 3, "attention", 5, variables={**on_gpus(directory, "ipc"), "REFUSER": str(refuser)})
        reports = all_well(job)
        if any(not report["note"].endswith("by staged") for report in reports.values()):
            fail(job, f"ranks report {reports}")
        if job.all_text().count(f"since rank {refuser} says: the stand-in opens no memory") != 3:
            fail(job, "not every rank says why")
        print(f"rank {refuser} of 3 cannot open the others' memory: all stage, and say why")


def gpu_faults(directory):
    """The same as `faults` on GPUs that lag behind their hosts: nothing hangs, and no result looks like one."""
    matrix = [(lane, ranks, victim, step, how, direction)
              for lane in ("ipc", "nccl", "staged") for ranks in (2, 3) for victim in range(ranks) for step in (-1, *range(8))
              for how in ("kill", "stop", "error") for direction in ("forward", "backward")
              if (step >= 0 or (lane != "staged" and (how, direction) in (("stop", "forward"), ("kill", "backward"))))
              and (LONG or (lane == "ipc" and (step < 0 or (3 * victim + step + len(how) + len(direction)) % 16 == ranks))
                   or (lane == "nccl" and (step < 0 and victim == 1 or
                                           (5 * victim + 7 * step + len(how) + len(direction)) % 23 == ranks)))]
    before, at_once = set(os.listdir("/dev/shm")), 3

    def some(part):
        jobs = []
        for lane, ranks, victim, step, how, direction in part:
            slow = {**on_gpus(directory, lane), "RINGATTN_STAND_IN_COPY_MS": "100" if step < 0 else "10"}
            jobs.append((Job(directory, ranks, "fault", victim, step, how, direction, variables=slow), victim, how, lane))
        for job, victim, how, lane in jobs:
            judge(job, victim, how)
            for rank in set(range(job.ranks)) - {victim}:
                if job.report(rank)["note"] != lane:
                    fail(job, f"rank {rank} did not use {lane}: {job.report(rank)}")

    def knowing_first(failures):
        """NCCL may know first that a rank is lost, but not which."""
        for failure in failures:
            early = {**on_gpus(directory, "nccl"), "RINGATTN_STAND_IN_NCCL": f"{failure}:0:6"}  # in backward
            judge(Job(directory, 2, "fault", 1, -1, "kill", "backward", variables=early), 1, "kill")

    for begin in range(0, len(matrix), at_once):
        patiently(some, matrix[begin:begin + at_once])
    patiently(knowing_first, ("fails", "refuses"))
    left = {name for name in set(os.listdir("/dev/shm")) - before if "ringattn" in name}
    if left:
        sys.exit(f"FAILED: left in /dev/shm: {left}")
    print(f"{len(matrix)} jobs: no survivor hangs, all name the right rank, no result looks like one, and nothing stays mapped")


def programs(directory, ranks, program, lines, runs):
    """Runs a program with each of these arguments and no report files; every rank prints a line that contains `lines`."""
    for arguments in runs:
        job = Job(directory, ranks, *arguments, program=program)
        try:
            job.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            fail(job, "it does not end")
        if job.process.returncode != 0 or job.all_text().count(lines) != ranks:
            fail(job, f"the launcher returned {job.process.returncode}")


def own(directory):
    """Programs that use MPI themselves, at every thread level, and one that finalizes MPI too early."""
    levels = ("single", "funneled", "serialized", "multiple")
    programs(directory, 5, os.environ["MPI_OWN"], " is through", [(level,) for level in levels])
    programs(directory, 5, os.environ["MPI_OWN"], " is through", [(level, "early") for level in ("funneled", "multiple")])
    print("rings on parts of a program's own world, opened and closed between its own MPI calls, at four thread levels")


def installed(directory):
    """The examples, built with the MPI's own compiler against an installed ringattn, find everything by themselves."""
    if os.environ.get("RA_SANITIZED"):
        print("skipped: consumers are built without the sanitizer's run-time")
        sys.exit(77)
    prefix = pathlib.Path(directory) / "prefix"
    subprocess.run(["cmake", "--install", os.environ["RA_BUILD"], "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
    libraries = next(prefix.rglob("libringattn.so")).parent
    os.environ.update(PKG_CONFIG_PATH=str(libraries / "pkgconfig"), LD_LIBRARY_PATH=str(libraries))
    os.environ.pop("RINGATTN_MODULE_PATH")
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "ringattn"], check=True, capture_output=True, text=True).stdout
    for source, line in (("ring_mpi.c", " over mpi: "), ("mpi/ring_of_a_part.c", " in its ring: largest error ")):
        program = pathlib.Path(directory) / pathlib.Path(source).stem
        path = pathlib.Path(os.environ["RA_SOURCE"]) / "examples" / source
        subprocess.run([os.environ["MPICC"], "-Wall", "-Wextra", "-Werror", path, *flags.split(), "-lm", "-o", program], check=True)
        for ranks in (2, 4):
            programs(directory, ranks, str(program), line, [()])
    print("both examples, built with mpicc against an installed ringattn, run on 2 and 4 ranks")


def one_post_mortem(job, ranks):
    for rank in ranks:
        if job.all_text().count(f"ringattn: warn: post-mortem of rank {rank}, step ") != 1:
            fail(job, f"rank {rank} did not leave one post-mortem")


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
        # half a second for the work before the fault, many ranks on two cores
        if report["seconds"] > job.timeout + 1 + 0.5 * patience.factor():
            fail(job, f"rank {rank} returned only after {report['seconds']} s")
    one_post_mortem(job, survivors if how != "error" else ())
    return len({reports[rank]["sentence"] for rank in survivors}) == 1


def faults(directory):
    """Every rank fails at every step of forward and backward, in every way."""
    sizes = (2, 3, 4) if LONG else (3,)
    matrix = [(ranks, victim, step, how, direction)
              for ranks in sizes for victim in range(ranks) for step in range(ranks)
              for how in ("kill", "stop", "error") for direction in ("forward", "backward")
              if LONG or (victim + step) % 3 == 0 or how == "error"]
    alike, at_once = 0, 3

    def some(part):
        jobs = [(Job(directory, ranks, "fault", victim, step, how, direction), victim, how)
                for ranks, victim, step, how, direction in part]
        return sum(judge(job, victim, how) for job, victim, how in jobs)

    for begin in range(0, len(matrix), at_once):
        alike += patiently(some, matrix[begin:begin + at_once])
    ways = [how for _, _, _, how, _ in matrix]
    kinds = ", ".join(f"{ways.count(how)} {how}" for how in sorted(set(ways)))
    print(f"{len(matrix)} jobs ({kinds}): no survivor hangs, all name the right rank; in {alike} with the very same sentence")


def deadlock(directory):
    """Ranks that are all alive and wait for each other: all are told the same, and who waits for whom."""

    def some(ranks):
        jobs = [Job(directory, ranks, "mistake", which, timeout=0.5) for which in range(4) if ranks > 2 or which != 2]
        for job in jobs:
            reports = job.finish(limit=30)
            for rank, report in reports.items():
                if report is None or report["note"] != "told" or report["sentence"] != reports[0]["sentence"]:
                    fail(job, f"rank {rank} reports {report}")
            one_post_mortem(job, range(ranks))
        return len(jobs)

    count = sum(patiently(some, ranks) for ranks in (2, 3, 4))
    print(f"{count} jobs whose ranks wait for each other: told on every rank, with one post-mortem each")


def alarms(directory):
    """No false alarm: a rank that does nothing at all for 0.8 of the timeout, one that computes for ten times the timeout."""
    rounds = 50 if LONG else 6

    def idle(what, timeouts, timeout, *more):
        """One rank does this for that many timeouts."""
        return all_well(Job(directory, 3, what, timeouts * timeout * patience.factor(), *more, timeout=timeout), limit=300)

    done = note(patiently(idle, "pause", 0.8, 1.0, rounds))
    print(f"{done} with one rank paused for 0.8 of the timeout: no alarm")
    patiently(idle, "busy", 10, 0.4)
    print("a step of ten times the timeout: no alarm")
    patiently(idle, "late", 5, 0.5)
    print("a rank that arrives late is waited for")
    never = ('if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then sleep 5; '
             'else exec "$RINGATTN" bench --seq 64 --start-timeout 1; fi')
    job = Job(directory, 3, "-c", never, program="sh")
    job.process.wait(timeout=60)
    # MPICH's launcher ends the second when the first has left, now and then: one that says it must be there.
    if "not every rank has arrived within 1 s" not in job.all_text():
        fail(job, "the others do not say that a rank is missing")
    print("a rank that never arrives is waited for as long as the start timeout says, also by MPI_Init")


def lengths(directory):
    """Messages that are longer than their receives: an error on every rank, and no byte beyond the buffer's end."""
    runs = [("long", 100, 1000), ("long", 100, 70000), ("long", 8000, 70000), ("long", 70000, 5 << 20), ("long", 5 << 20, 9 << 20),
            ("long", 70000, 100), ("unequal", 5000), ("unequal", 300000)]
    for begin in range(0, len(runs), 3):
        for job in [Job(directory, 3, *arguments) for arguments in runs[begin:begin + 3]]:
            for rank, report in job.finish().items():
                if report is None or report["status"] != "RA_PROTOCOL" or "bytes" not in report["sentence"]:
                    fail(job, f"rank {rank} reports {report}")
    print(f"{len(runs)} jobs with messages of another length than expected: told on every rank, nothing is overwritten")


def mixed(directory):
    """The launcher of one MPI and the module of another: told, instead of as many rings of one rank as there are processes."""
    other = "mpich" if IMPLEMENTATION == "openmpi" else "openmpi"
    if not pathlib.Path(os.environ["RA_BUILD"], f"ringattn_mpi_{other}.so").exists():
        print(f"skipped: there is no module for {other}")
        sys.exit(77)
    os.environ["RINGATTN_MPI"] = other
    job = Job(directory, 2, "bench", "--seq", "64", "--json", program=os.environ["RINGATTN"])
    job.process.wait(timeout=60)
    if "schema" in job.all_text() or "the launcher started 2 ranks" not in job.all_text():
        fail(job, "it was not refused")
    print("a launcher of one MPI with the module of another is refused")


def nomem(directory):
    done = note(all_well(Job(directory, 2, "nomem"), limit=300))
    print(f"{done} to open a communicator for want of memory: known on all ranks, nothing leaked")


def big(directory):
    if not LONG:
        print("skipped: a message over 4 GiB takes 9 GiB of memory; RINGATTN_LONG=1 runs it")
        sys.exit(77)
    available = int(next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable")).split()[1])
    if available < 12 << 20:
        print(f"skipped: a message over 4 GiB takes 9 GiB of memory, and {available >> 20} GiB are free")
        sys.exit(77)
    seconds = all_well(Job(directory, 2, "big", timeout=60), limit=300)[1]["seconds"]
    print(f"a message of 4.5 GiB arrived whole, after {seconds:.1f} s")


def write_npy(path, shape, seed):
    """Uniform float32 in [-1, 1), without NumPy."""
    numbers = random.Random(seed)
    count = math.prod(shape)
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        array.array("f", [numbers.random() * 2 - 1 for _ in range(count)]).tofile(file)


def ranks_of(program, directory):
    """The processes of a job by rank: those that run the program in this directory."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "exe") != os.path.realpath(program):
                continue
            if os.readlink(entry / "cwd") != os.path.realpath(directory):
                continue
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                    found[int(value)] = int(entry.name)
        except (OSError, ValueError):
            pass
    return found


def has_mapped(process, name):
    try:
        return name in pathlib.Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
    except OSError:
        return False


def command(directory):
    """The command line in the middle of a long step, when a rank is killed: the others leave it at that."""
    program = os.environ["RINGATTN"]
    os.chdir(directory)
    for seed, name in enumerate(("q", "k", "v")):
        write_npy(f"{name}.npy", (1, 24000, 2, 32), seed)
    inputs = [part for name in ("q", "k", "v") for part in (f"--{name}", f"{name}.npy")]

    def lose(victim):
        job = Job(directory, 3, "run", *inputs, "--out", "killed.npy", "--timeout", str(patience.factor()), "--kernel",
                  "scalar", "--threads", "1", program=program, kill=True)
        while len(processes := ranks_of(program, directory)) < 3 and job.process.poll() is None:
            time.sleep(0.01)
        while not all(has_mapped(process, "v.npy") for process in processes.values()) and job.process.poll() is None:
            time.sleep(0.01)  # before that MPI may still be starting, and a rank that dies then is its own affair
        time.sleep(1.5)  # in the middle of the ring: it takes far longer than that
        if job.process.poll() is not None:
            fail(job, "it ended before a rank could be killed")
        os.kill(processes[victim], signal.SIGKILL)
        begin = time.monotonic()
        while ranks_of(program, directory) and time.monotonic() < begin + 20 * patience.factor():
            time.sleep(0.01)
        seconds = time.monotonic() - begin
        for left in ranks_of(program, directory).values():
            os.kill(left, signal.SIGKILL)
        job.finish(waited_for=(), limit=0.0)
        # the timeout, a second, and one more for tiles of a slow kernel, three ranks on two cores
        if seconds > 1 + 2 * patience.factor():
            fail(job, f"survivors of rank {victim} were there for {seconds:.1f} s")
        if f"rank {victim} " not in job.all_text():
            fail(job, f"nobody names rank {victim}")
        one_post_mortem(job, {0, 1, 2} - {victim})
        if os.path.exists("killed.npy"):
            fail(job, "an output appeared under its name")

    for victim in (0, 2):
        patiently(lose, victim)
    print("a killed rank: the survivors name it, with one post-mortem each, and leave within the timeout; no output appears")


class Hosts:
    """Hosts of their own address on this machine: network namespaces, each with one leg on a bridge in another one."""

    def __init__(self, directory, count):
        self.names = [f"ra{os.getpid()}-{chr(ord('a') + i)}" for i in range(count)]
        self.hub = f"ra{os.getpid()}-hub"
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.agent = pathlib.Path(directory) / "agent.sh"
        self.made = []

    def run(self, *command):
        return subprocess.run(command, check=True, capture_output=True, text=True)

    def __enter__(self):
        try:
            for name in (self.hub, *self.names):
                self.run("ip", "netns", "add", name)
                self.made.append(name)
                self.run("ip", "-n", name, "link", "set", "lo", "up")
            self.run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
            self.run("ip", "-n", self.hub, "link", "set", "bridge", "up")
            for i, (name, address) in enumerate(zip(self.names, self.addresses)):
                self.run("ip", "-n", self.hub, "link", "add", f"leg{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
                self.run("ip", "-n", self.hub, "link", "set", f"leg{i}", "master", "bridge", "up")
                self.run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                self.run("ip", "-n", name, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            print(f"skipped: network namespaces are not allowed here ({getattr(error, 'stderr', error)})".strip())
            sys.exit(77)
        # What the launcher takes for ssh: enters the host, under a host name of its own.
        cases = "".join(f"{address}) name={name} ;; " for name, address in zip(self.names, self.addresses))
        self.agent.write_text("#!/bin/sh\n"
                              'while [ "${1#-}" != "$1" ]; do shift; done\n'
                              f'case "$1" in {cases}*) exit 1 ;; esac\nshift\n'
                              'exec ip netns exec "$name" unshare -u sh -c \'hostname "$0"; exec sh -c "$*"\' "$name" "$@"\n')
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_):
        for name in self.made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def cut(self, i):
        self.run("ip", "-n", self.hub, "link", "set", f"leg{i}", "down")

    def job(self, directory, *arguments, **options):
        """One rank a host, over TCP; the launcher runs on the first host."""
        if IMPLEMENTATION == "openmpi":
            launcher = ["--mca", "plm_rsh_agent", str(self.agent), "--mca", "btl", "tcp,self", "--mca", "pml", "ob1",
                        "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
                        "--host", ",".join(f"{address}:1" for address in self.addresses)]
            for name in ("RESULT", "TIMEOUT", "RINGATTN_MODULE_PATH"):
                launcher += ["-x", name]
        else:
            launcher = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-iface", "eth0",
                        "-hosts", ",".join(self.addresses)]
            os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="eth0")
        first = self.names[0]
        prefix = ["ip", "netns", "exec", first, "unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"', first]
        return Job(directory, len(self.names), *arguments, launcher=launcher, prefix=prefix, **options)


def hosts(directory):
    """Three hosts over TCP: the ring works; and when one host's cable is pulled, the two others name its rank."""
    with Hosts(directory, 3) as net:
        job = net.job(directory, "ring", 20, timeout=5.0)
        # Debian's MPICH 4.0.2 hangs in MPI_Finalize over UCX's TCP, with or without ringattn: its end is not awaited.
        if IMPLEMENTATION == "openmpi":
            all_well(job)
        else:
            job.wait_for_reports(job.started + 60)
            job.end_stopped(range(3))
            for rank, report in job.finish(limit=0.0).items():
                if report is None or report["status"] != "RA_OK":
                    fail(job, f"rank {rank} reports {report}")
        print("three hosts of their own address pass buffers around over TCP")
    if not any(patiently(cable_pulled, directory) for _ in range(3)):
        sys.exit("FAILED: the launcher took the rank that was cut off away, three times")


def cable_pulled(directory):
    """False: nothing was learnt, since MPICH's launcher ended the rank that was cut off before it could report."""
    with Hosts(directory, 3) as net:
        job = net.job(directory, "ring", 1000, timeout=1.0)
        while not all(pathlib.Path(f"{job.result}.{rank}.pid").exists() for rank in range(3)):
            if job.process.poll() is not None or time.monotonic() > job.started + 30:
                fail(job, "the ranks do not start")
            time.sleep(0.01)
        time.sleep(0.7)
        net.cut(2)
        cut_at = time.monotonic()
        job.wait_for_reports(cut_at + 10 * patience.factor())
        seconds = time.monotonic() - cut_at
        job.end_stopped(range(3))
        reports = job.finish(limit=0.0)
        for rank in (0, 1):
            report = reports[rank]
            if report is None or report["status"] not in ("RA_TIMEOUT", "RA_PEER_LOST") or "rank 2 " not in report["sentence"]:
                fail(job, f"rank {rank} reports {report}")
        if reports[2] is None and IMPLEMENTATION == "mpich":
            return False
        if reports[2] is None or reports[2]["status"] == "RA_OK":
            fail(job, f"rank 2, which is cut off, reports {reports[2]}")
        if seconds > job.timeout + 1.0 + 0.5 * patience.factor():
            fail(job, f"that took {seconds:.1f} s")
        print(f"one cable pulled: the other two name its rank, and it returns too, within {seconds:.2f} s "
              f"(timeout {job.timeout:g} s)")
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="ringattn-mpi-", ignore_cleanup_errors=True) as temporary:
        try:
            patiently(globals()[sys.argv[1]], temporary)
        except patience.Failed as error:
            sys.exit(str(error))
        finally:
            end_jobs()
