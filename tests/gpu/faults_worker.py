"""One rank of faults.py, under mpirun: a ring on a GPU (or on the stand-in for one) in which a rank is lost.

    faults_worker.py WHO STEP HOW PASS     rank WHO gets the signal HOW (kill, stop) when its host has given the device step
                                           STEP of forward or backward; STEP -1: half-way through the time of a pass

The pass is repeated until it fails. Leaves one line of JSON in RESULT.<rank>, as tests/mpi/rank.c does."""

import ctypes
import json
import os
import signal
import sys
import threading
import time

import nccl
import numpy as np
from ringattn import _engine, _lib

COMPUTE = 0  # ra_activity
BEFORE = 77.0  # what results hold before a call
HEADS, DIM, ROWS, BUCKETS = 4, 64, int(os.environ["ROWS"]), int(os.environ["BUCKETS"])  # of a rank
lib = _lib.lib
library = ctypes.CDLL(lib._name)  # what the package itself does not declare
library.ra_cuda_alloc.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)]
library.ra_cuda_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
library.ra_cuda_synchronize.argtypes = [ctypes.c_void_p]
library.ra_comm_mpi_world.argtypes = [ctypes.c_double, ctypes.POINTER(ctypes.c_void_p)]
library.ra_comm_rank.argtypes = library.ra_comm_size.argtypes = [ctypes.c_void_p]


class Event(ctypes.Structure):
    _fields_ = [("activity", ctypes.c_int), ("rank", ctypes.c_int32), ("peer", ctypes.c_int32), ("step", ctypes.c_int64)]
    _fields_ += [("bytes", ctypes.c_int64), ("begin", ctypes.c_double), ("end", ctypes.c_double), ("phase", ctypes.c_char_p)]


TRACER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Event))
library.ra_comm_set_tracer.argtypes = [ctypes.c_void_p, TRACER, ctypes.c_void_p]


class Problem(Exception):
    pass


class OnDevice:
    """A bfloat16 tensor [1, N, H, D], or lse [1, H, N] in float32, in memory of the device."""

    def __init__(self, shape, values=None):
        self.shape, self.memory, self.wide = shape, ctypes.c_void_p(), len(shape) == 3
        _lib.check(library.ra_cuda_alloc((4 if self.wide else 2) * int(np.prod(shape)), ctypes.byref(self.memory)))
        self.write(np.full(shape, BEFORE) if values is None else values)
        n, h, d = (shape[1], shape[2], shape[3]) if len(shape) == 4 else (shape[2], shape[1], 1)
        strides = (n * h * d, h * d, d) if len(shape) == 4 else (n * h, 1, n)
        self.view = (self.memory.value, *strides)

    def write(self, values):
        values = np.ascontiguousarray(values, np.float32).view(np.uint32)
        if not self.wide:
            values = (values >> 16).astype(np.uint16)
        _lib.check(library.ra_cuda_copy(self.memory, values.ctypes.data, values.nbytes, None))
        _lib.check(library.ra_cuda_synchronize(None))

    def read(self):
        values = np.empty(self.shape, np.uint32 if self.wide else np.uint16)
        _lib.check(library.ra_cuda_synchronize(None))
        _lib.check(library.ra_cuda_copy(values.ctypes.data, self.memory, values.nbytes, None))
        _lib.check(library.ra_cuda_synchronize(None))
        return (values if self.wide else values.astype(np.uint32) << 16).view(np.float32)


class Calls:
    """A plan of some ranks, and this rank's tensors."""

    def __init__(self, comm, ranks, seed):
        draw, shape = np.random.default_rng(seed), (1, ROWS, HEADS, DIM)
        self.t = {name: OnDevice(shape, draw.standard_normal(shape)) for name in ("q", "k", "v", "dout")}
        self.t |= {name: OnDevice(shape) for name in ("out", "dq", "dk", "dv")}
        self.t["lse"] = OnDevice((1, HEADS, ROWS))
        desc = _lib.Desc()
        lib.ra_attention_desc_init(desc)
        desc.dtype, desc.batch, desc.seq_q, desc.seq_k = _lib.BF16, 1, ranks * ROWS, ranks * ROWS
        desc.heads, desc.kv_heads, desc.head_dim, desc.device = HEADS, HEADS, DIM, _lib.CUDA
        desc.bucket = ROWS // BUCKETS
        if ranks > 1:
            desc.schedule = _lib.SCHEDULE["ring"]
        self.plan = ctypes.c_void_p()
        _lib.check(lib.ra_plan_create(comm, desc, ctypes.byref(self.plan)))

    def results(self, name):
        return [self.t[x] for x in (("out", "lse") if name == "forward" else ("dq", "dk", "dv"))]

    def call(self, name):
        """The status; results of a call that fails are void."""
        for result in self.results(name):
            result.write(np.full(result.shape, BEFORE))
        packed, names = _engine._FORWARD, ["q", "k", "v", "out", "lse"]
        if name == "backward":
            packed, names = _engine._BACKWARD, [*names, "dout", None, "dq", "dk", "dv"]
        numbers = [x for part in names for x in (self.t[part].view if part else (0, 0, 0, 0))]
        return getattr(lib, "ra_" + name)(self.plan, packed.pack(*numbers, 0))


def until_it_fails(calls, name, seconds):
    """(status, sentence, how long the call that failed was in the library); calls before that are right."""
    right = None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        status = calls.call(name)
        sentence, took = _lib.last_error(), time.monotonic() - begin
        found = [result.read() for result in calls.results(name)]
        if status:
            for values in found:
                if not (np.isnan(values).all() or (values == BEFORE).all()):
                    raise Problem("results of a call that failed are not NaN")
            return status, sentence, took
        if right is not None and not all(np.array_equal(a, b) for a, b in zip(found, right)):
            raise Problem("two calls that succeeded have different results")
        right = found
    raise Problem("no call failed")


def lose_me(comm, how, step, name, seconds):
    """From now on. What the tracer is called by must stay."""
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how]

    def event(_, told):
        if told.contents.activity == COMPUTE and told.contents.step == step and told.contents.phase == name.encode():
            os.kill(os.getpid(), number)

    if step < 0:
        threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
        return None
    tracer = TRACER(event)
    _lib.check(library.ra_comm_set_tracer(comm, tracer, None))
    return tracer


def report(rank, status, seconds, sentence, note):
    path = f"{os.environ['RESULT']}.{rank}"
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        name = lib.ra_status_name(status).decode()
        json.dump({"rank": rank, "status": name, "seconds": round(seconds, 3), "sentence": sentence, "note": note}, file)
    os.rename(path + ".tmp", path)


def main():
    who, step, how, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    timeout = float(os.environ["TIMEOUT"])
    if os.environ["RINGATTN_LANE"] == "nccl":
        os.environ.update(nccl.apart(os.environ["OMPI_COMM_WORLD_RANK"]))
    comm, alone = ctypes.c_void_p(), ctypes.c_void_p()
    _lib.check(library.ra_comm_mpi_world(60.0, ctypes.byref(comm)))
    rank, ranks = library.ra_comm_rank(comm), library.ra_comm_size(comm)
    with open(f"{os.environ['RESULT']}.{rank}.pid", "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    try:
        _lib.check(lib.ra_comm_self(ctypes.byref(alone)))
        own = Calls(alone, 1, 100 + rank)
        _lib.check(own.call("forward"))
        right = own.t["out"].read()
        _lib.check(lib.ra_comm_set_timeout(comm, 60.0, 60.0))  # while processes load kernels
        ring = Calls(comm, ranks, rank)
        for _ in range(2):
            for one in ("forward", "backward"):
                begin = time.monotonic()
                _lib.check(ring.call(one))
                for result in ring.results(one):
                    result.read()
                seconds = time.monotonic() - begin
        _lib.check(lib.ra_comm_allgather(comm, b"", b"", 0))
        _lib.check(lib.ra_comm_set_timeout(comm, timeout, 60.0))
        kept = lose_me(comm, how, step, name, 0.5 * seconds) if rank == who else None
        status, sentence, took = until_it_fails(ring, name, timeout + 10)
        lib.ra_plan_destroy(ring.plan)
        lib.ra_comm_destroy(comm)
        _lib.check(own.call("forward"))
        if not np.array_equal(own.t["out"].read(), right):
            raise Problem("the device does not compute as before")
        report(rank, status, took, sentence, "its device computes on")
        del kept
    except (Problem, RuntimeError, ValueError) as problem:
        report(rank, _lib.INTERNAL, 0.0, str(problem), "")
    os._exit(5)  # nobody waits for the dead in MPI_Finalize


if __name__ == "__main__":
    main()
