"""One rank of a gloo group: dying_rank.py RANK RANKS FOLDER WAY. The last rank leaves in that way; the others write what they
get and how
soon."""

import json
import os
import signal
import sys
import threading
import time

import ringattn
import torch
import torch.distributed as dist

rank, ranks, folder, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
x = torch.randn(1, 4096 // ranks, 2, 64)
ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=3)
dist.barrier()
if rank == ranks - 1:
    if way == "exit":
        os._exit(7)
    if way == "kill during a call":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if way == "stop during a call":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
start, found = time.monotonic(), None
try:
    for _ in range(1000):
        ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=3, threads=1)
except RuntimeError as error:
    found = {"status": error.status, "message": str(error), "seconds": time.monotonic() - start}
try:
    ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=3)
except RuntimeError as error:
    found["again"] = str(error)
with open(os.path.join(folder, f"{rank}.json"), "w") as file:
    json.dump(found, file)
os._exit(0)
