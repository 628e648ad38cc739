"""Two gloo ranks, one of which holds Python's lock for three timeouts while the other waits for it: busy_rank.py TIMEOUT."""

import ctypes
import os
import sys

import forks
import ringattn
import torch
import torch.distributed as dist

TIMEOUT = float(sys.argv[1])
sleep_with_the_lock = ctypes.PyDLL(None).usleep  # PyDLL keeps the lock that CDLL gives away


def work(rank):
    dist.init_process_group("gloo")
    x = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0))
    mine = ringattn.shard(x, dist.group.WORLD)
    for busy in (False, True):
        if busy and rank == 1:
            sleep_with_the_lock(int(3 * TIMEOUT * 1e6))
        out = ringattn.attention(mine, mine, mine, group=dist.group.WORLD, timeout=TIMEOUT)
    expected = ringattn.shard(ringattn.attention(x, x, x), dist.group.WORLD)
    print(f"rank {rank}: {'right' if torch.allclose(out, expected, atol=1e-6) else 'wrong'}")
    dist.barrier()


if __name__ == "__main__":
    for child in forks.start(2, work):
        os.waitpid(child, 0)
