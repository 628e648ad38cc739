"""Ranks as children of one process that has torch loaded already, which takes longer than most tests: forks.py RANKS SCRIPT.

The script sees what torchrun would have told it.
"""

import atexit
import os
import runpy
import socket
import sys
import traceback

import ringattn  # noqa: F401  (loaded before there are ranks)
import torch.distributed  # noqa: F401


def start(ranks, work):
    """Runs work(rank) in a child for each rank; returns their process numbers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            failed = False
            try:
                work(rank)
                atexit._run_exitfuncs()
            except BaseException:
                traceback.print_exc()
                failed = True
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)  # without taking torch apart, which takes longer than loading it
        children.append(child)
    return children


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    ranks = int(sys.argv.pop(0))
    import torch._dynamo  # noqa: F401  (which any optimizer loads)

    ended = [os.waitpid(child, 0)[1] for child in start(ranks, lambda rank: runpy.run_path(sys.argv[0], run_name="__main__"))]
    sys.exit(any(ended))
