"""Rings whose ranks are threads of this process, all on one GPU: their tensors, their calls, and how long a call takes.

Where torch sees no GPU the ranks compute on the stand-in for one (tests/stand_in), in memory of the host."""

import ctypes
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from ringattn import _engine, _lib
from ringattn._devices import Streams

PASSES = {"forward": 4, "backward": 10}  # flops a pair and element
LAYOUTS = {"full": "contiguous", "causal": "zigzag"}  # of a pattern
HEAD_START = 20_000_000  # cycles, about 12 ms: all of a call is enqueued before the GPU begins with it

GPU = torch.cuda.is_available()
PLACE = "cuda" if GPU else "cpu"
lib = _lib.lib
library = ctypes.CDLL(lib._name)  # what the package itself does not declare
library.ra_cuda_between.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)]
library.ra_cuda_synchronize.argtypes = [ctypes.c_void_p]


class Stream:
    """The caller's: torch's own, so that torch's functions run in order with the rings."""

    def __init__(self):
        self.handle = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if GPU else None)
        if not GPU:
            _lib.check(lib.ra_cuda_open_stream(ctypes.byref(self.handle)))

    def keep_busy(self):
        if GPU:
            torch.cuda._sleep(HEAD_START)

    def synchronize(self):
        _lib.check(library.ra_cuda_synchronize(self.handle))


def pairs(n, pattern):
    return n * (n + 1) // 2 if pattern == "causal" else n * n


def describe(n, heads, head_dim, pattern, ranks, bucket=0):
    desc = _lib.Desc()
    lib.ra_attention_desc_init(desc)
    desc.dtype, desc.batch, desc.seq_q, desc.seq_k = _lib.BF16, 1, n, n
    desc.heads, desc.kv_heads, desc.head_dim, desc.causal = heads, heads, head_dim, pattern == "causal"
    desc.device, desc.bucket = _lib.CUDA, bucket
    if ranks > 1:
        desc.layout, desc.schedule = _lib.LAYOUT[LAYOUTS[pattern]], _lib.SCHEDULE["ring"]
    return desc


def rows_of(desc, rank, ranks):
    """The rows that a rank holds, of queries and of keys alike."""
    found = _lib.Shard(), _lib.Shard()
    _lib.check(lib.ra_shard_rows(desc, rank, ranks, *found))
    runs = [(run.start, run.step, run.count) for run in found[0].rows if run.count]
    return torch.cat([torch.arange(start, start + step * count, step) for start, step, count in runs])


class Rank:
    """One rank's tensors, [1, N, H, D], lse [1, H, N], and its arguments."""

    def __init__(self, desc, rank, ranks, whole, stream):
        self.rows = rows_of(desc, rank, ranks)
        self.tensors = {name: t[:, self.rows.to(PLACE)] for name, t in whole.items()}
        for name in ("out", "dq", "dk", "dv"):
            self.tensors[name] = torch.empty_like(self.tensors["q"])
        self.tensors["lse"] = torch.empty(1, desc.heads, len(self.rows), device=PLACE)
        view = {name: (t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)) for name, t in self.tensors.items()}
        lse = self.tensors["lse"]
        view["lse"] = (lse.data_ptr(), lse.stride(0), 1, lse.stride(1))
        view[""] = (0, 0, 0, 0)
        self.arguments = {
            name: ctypes.create_string_buffer(packed.pack(*[x for part in parts for x in view[part]], stream))
            for name, packed, parts in (
                ("forward", _engine._FORWARD, ("q", "k", "v", "out", "lse")),
                ("backward", _engine._BACKWARD, ("q", "k", "v", "out", "lse", "dout", "", "dq", "dk", "dv")),
            )
        }
        self.plan, self.begin, self.end = ctypes.c_void_p(), 0.0, 0.0

    def call(self, name, together):
        function, arguments = getattr(lib, "ra_" + name), self.arguments[name]
        together.wait()
        self.begin = time.perf_counter()
        status = function(self.plan, arguments)
        self.end = time.perf_counter()
        _lib.check(status)

    def statistics(self):
        found = _lib.Stats(struct_size=ctypes.sizeof(_lib.Stats))
        _lib.check(lib.ra_stats(self.plan, found))
        return found


class Ring:
    """Ranks with their shards of the `whole` tensors q, k, v and dout."""

    def __init__(self, stream, whole, pattern, ranks, bucket=0):
        _, n, heads, head_dim = whole["q"].shape
        self.stream, self.pattern, self.count = stream, pattern, ranks
        self.desc = describe(n, heads, head_dim, pattern, ranks, bucket)
        self.streams, self.comms = Streams(ranks), (ctypes.c_void_p * ranks)()
        _lib.check(lib.ra_comm_threads(ranks, self.comms))
        self.ranks = [Rank(self.desc, rank, ranks, whole, self.streams.of(rank)) for rank in range(ranks)]
        if GPU:
            torch.cuda.synchronize()
        self.threads, self.together = ThreadPoolExecutor(ranks), threading.Barrier(ranks)
        self.marks = ctypes.c_void_p(), ctypes.c_void_p()
        self.each(lambda i: lib.ra_plan_create(self.comms[i], self.desc, ctypes.byref(self.ranks[i].plan)))
        self.host_seconds = 0.0

    def each(self, work):
        """Runs work(rank) on a thread for each rank; a status that it returns is checked there."""

        def one(rank):
            status = work(rank)
            if status is not None:
                _lib.check(status)

        for done in [self.threads.submit(one, rank) for rank in range(self.count)]:
            done.result()

    def run(self, name):
        """Enqueues a pass. `host_seconds`: from when the last rank began with it until the last was through: how Python wakes
        its threads, one after the other, does not count."""
        self.streams.fork(self.stream.handle)
        self.each(lambda rank: self.ranks[rank].call(name, self.together))
        _lib.check(self.streams.join(self.stream.handle))
        self.host_seconds = max(rank.end for rank in self.ranks) - max(rank.begin for rank in self.ranks)

    def time(self, name):
        """Milliseconds of a pass on the device, from when the first rank could begin to when the last is done."""
        start, end = self.marks
        seconds = ctypes.c_double()
        self.stream.keep_busy()
        _lib.check(lib.ra_cuda_mark(self.stream.handle, ctypes.byref(start)))
        self.run(name)
        _lib.check(lib.ra_cuda_mark(self.stream.handle, ctypes.byref(end)))
        _lib.check(library.ra_cuda_between(start, end, ctypes.byref(seconds)))
        return 1e3 * seconds.value

    def whole(self, name, head):
        """A head of a result, all rows of it."""
        found = torch.empty(self.desc.seq_q, self.desc.head_dim, dtype=torch.bfloat16, device=PLACE)
        for rank in self.ranks:
            found[rank.rows.to(PLACE)] = rank.tensors[name][0, :, head]
        return found

    def summaries(self):
        for rank in range(self.count):
            found = _lib.Summary(struct_size=ctypes.sizeof(_lib.Summary))
            _lib.check(lib.ra_plan_summary(self.desc, rank, self.count, found))
            yield found

    def planned_bytes(self):
        """Of each rank."""

        def of_rank(s):
            return s.shard_bytes + s.shard_bytes_backward + max(s.workspace_bytes, s.workspace_bytes_backward)

        return list(map(of_rank, self.summaries()))

    def measured_bytes(self):
        """Tensors and pool of the rank that has most."""
        return max(sum(t.nbytes for t in rank.tensors.values()) + rank.statistics().pool_peak for rank in self.ranks)

    def close(self):
        self.stream.synchronize()
        self.each(lambda rank: lib.ra_plan_destroy(self.ranks[rank].plan))
        for comm in self.comms:
            lib.ra_comm_destroy(comm)
        for mark in self.marks:
            lib.ra_cuda_forget(mark)
        self.streams.close()
        self.threads.shutdown()
        self.ranks = []


def take_turns(rings, name, turns):
    """[{milliseconds, host_seconds} of each turn] of rings that take turns at a pass, after one turn that does not count."""
    found = [[] for _ in rings]
    for turn in range(turns + 1):
        for ring, samples in zip(rings, found):
            ms = ring.time(name)
            if turn:
                samples.append((ms, ring.host_seconds))
    return [
        {"ms": statistics.median(ms for ms, _ in samples), "host": statistics.median(host for _, host in samples)}
        for samples in found
    ]
