"""Where NCCL is, and how ranks that share one GPU use it."""

import ctypes
import glob
import os
import sys


def apart(rank):
    """The environment of a rank that says it is a host of its own: NCCL refuses ranks of one host that share a GPU."""
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def find():
    """The file of NCCL for RINGATTN_NCCL: what that names, or where libraries are, or torch's. None: there is none."""
    places = [os.environ.get("RINGATTN_NCCL", ""), "libnccl.so.2"]
    places += [name for path in sys.path for name in glob.glob(os.path.join(path, "nvidia/nccl/lib/libnccl.so.2"))]
    for place in filter(None, places):
        try:
            ctypes.CDLL(place)
            return place
        except OSError:
            continue
    return None
