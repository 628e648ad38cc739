"""Three gloo ranks, the last of which just exits: dying_rank.py FOLDER. The others write what they get and how soon."""

import json
import os
import sys
import time

import forks
import ringattn
import torch
import torch.distributed as dist

RANKS = 3
folder = sys.argv[1]


def work(rank):
    dist.init_process_group("gloo")
    x = torch.randn(1, 4096 // RANKS, 2, 64)
    ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=6)
    dist.barrier()
    if rank == RANKS - 1:
        os._exit(7)
    start, found = time.monotonic(), None
    try:
        while True:
            ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=6, threads=1)
    except RuntimeError as error:
        found = {"status": error.status, "message": str(error), "seconds": time.monotonic() - start}
    try:
        ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=6)
    except RuntimeError as error:
        found["again"] = str(error)
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(found, file)
    os._exit(0)


children = forks.start(RANKS, work)
for child in children:
    os.waitpid(child, 0)
