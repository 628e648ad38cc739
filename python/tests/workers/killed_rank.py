"""Gloo ranks, one of which is killed or stopped at one of its sends: killed_rank.py FOLDER PATIENCE [long].

Every rank, step, way and pass. The survivors of each job write what they get and how soon, to FOLDER/JOB/RANK.json;
FOLDER/jobs.json lists the jobs.
"""

import itertools
import json
import os
import pathlib
import signal
import sys
import time

import forks
import ringattn
import torch
import torch.distributed as dist
from ringattn._mailbox import CONTROL_TAG, Mailbox

PATIENCE = float(sys.argv[2])
TIMEOUT = 1.5 * PATIENCE  # seconds of silence
LIMIT = 30 * PATIENCE  # of a whole job: what lives then hangs
AT_ONCE = 3
WAYS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def strike_at_send(step, way):
    """This process ends, or stops, where it would post its step-th send from now on."""
    post, count = Mailbox._post, itertools.count()

    def counted(self, peer, tag, address, size, receiving, out):
        if not receiving and tag != CONTROL_TAG and next(count) == step:
            os.kill(os.getpid(), WAYS[way])
        return post(self, peer, tag, address, size, receiving, out)

    Mailbox._post = counted


def work(rank, job, folder):
    dist.init_process_group("gloo")
    q, k, v = (torch.randn(1, 96, 2, 16, requires_grad=True) for _ in range(3))

    def forward():
        return ringattn.attention(q, k, v, group=dist.group.WORLD, schedule="ring", timeout=TIMEOUT, threads=1)

    forward().sum().backward()  # plans are made
    out = forward()
    dist.barrier()
    if rank == job["victim"]:
        strike_at_send(job["step"], job["way"])
    start, found = time.monotonic(), None
    try:
        out.sum().backward() if job["direction"] == "backward" else forward()
    except RuntimeError as error:
        found = {"status": error.status, "message": str(error), "seconds": time.monotonic() - start}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def finish(children, victim):
    """Waits for the survivors; ends what is left."""
    left, end = set(children) - {children[victim]}, time.monotonic() + LIMIT
    while left and time.monotonic() < end:
        left = {child for child in left if os.waitpid(child, os.WNOHANG)[0] == 0}
        time.sleep(0.05)
    for child in left | {children[victim]}:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


folder = pathlib.Path(sys.argv[1])
long = sys.argv[3:] == ["long"]
jobs = [
    {"ranks": ranks, "victim": victim, "step": step, "way": way, "direction": direction}
    for ranks in ((2, 3, 4) if long else (3,))
    for victim, step in itertools.product(range(ranks), repeat=2)
    for way, direction in itertools.product(WAYS, ("forward", "backward"))
    if long or (victim + step) % 3 == 0
]
for begin in range(0, len(jobs), AT_ONCE):
    running = []
    for number in range(begin, min(begin + AT_ONCE, len(jobs))):
        job, place = jobs[number], folder / str(number)
        place.mkdir()
        running.append((forks.start(job["ranks"], lambda rank, job=job, place=place: work(rank, job, place)), job["victim"]))
    for children, victim in running:
        finish(children, victim)
(folder / "jobs.json").write_text(json.dumps(jobs))
