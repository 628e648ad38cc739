"""One rank of a gloo group. The last rank leaves in the way that the argument names; the others write what they get and how soon."""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import ringattn

way, folder = sys.argv[1], sys.argv[2]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others when one is gone; they want to say what they saw
dist.init_process_group("gloo")
x = torch.randn(1, 4096 // ranks, 2, 64)
ringattn.attention(x, x, x, group=dist.group.WORLD, timeout=3)
pids = [None] * ranks
dist.all_gather_object(pids, os.getpid())
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
if rank == 0:
    for other in range(ranks):  # a stopped process does not end by itself
        while other < ranks - 1 and not os.path.exists(os.path.join(folder, f"{other}.json")):
            time.sleep(0.05)
    os.kill(pids[ranks - 1], signal.SIGKILL)
os._exit(0)
