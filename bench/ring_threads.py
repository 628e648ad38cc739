#!/usr/bin/env python3
"""What it costs to be several ranks of one CPU: rings of threads beside one rank that has as many cores, calls in turns.

    bench/ring_threads.py --library build/libringattn.so [--library other.so] [--seq 65536] [--cores 4] [--ranks 2,4] [--json FILE]

The cores are shared out among the ranks of a ring. Of several libraries (versions to be compared) each makes every ring, and the
first one's rank alone is what all are compared with. Times are of whole calls, from when the first rank begins until the last is
done. A line has the time of one rank over that of the ring, by the minima and by the medians of all rounds, and where the time of
the ring's fastest call went, as shares of it, means over ranks: computing, waiting for messages, and the rest (agreeing,
packing, clearing, adding up). `apart`: how much the rank that computes longest in all is above the mean; of this, better
balance between ranks would give back at most so much.
"""
import argparse
import ctypes
import json
import os
import statistics
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

FLOPS = {"forward": 4, "backward": 10}  # a pair and element
ROOT = Path(__file__).resolve().parent.parent


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--library", action="append", help="default: build/libringattn.so")
    p.add_argument("--seq", type=int, default=65536)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--cores", type=int, default=4, help="of the one rank, and of all ranks of a ring together")
    p.add_argument("--ranks", default="2,4", help="sizes of rings")
    p.add_argument("--bucket", default="0", help="rows; 0: the library's choice. Several make several rings")
    p.add_argument("--full", action="store_true", help="dense, contiguous shards; else causal, zigzag")
    p.add_argument("--kernel", help="default: the best")
    p.add_argument("--passes", default="forward,backward")
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--budget", type=float, default=0, help="seconds; a pass ends after its share of them, rounds or not")
    p.add_argument("--json", help="a file for all times")
    return p.parse_args()


ARGS = arguments()
LIBRARIES = [str(Path(path).resolve()) for path in ARGS.library or [ROOT / "build/libringattn.so"]]
os.environ["RINGATTN_LIBRARY"] = LIBRARIES[0]
sys.path.insert(0, str(ROOT / "python"))
from ringattn import _lib  # noqa: E402

FORWARD, BACKWARD = struct.Struct("=" + "Qqqq" * 5 + "Q"), struct.Struct("=" + "Qqqq" * 10 + "Q")
BOTH = {"forward": (FORWARD, "q k v out lse"), "backward": (BACKWARD, "q k v out lse dout none dq dk dv")}


def load(path):
    library = ctypes.CDLL(path)
    for name, (result, parameters) in _lib._FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


class Shards:
    """The tensors of the ranks of a ring; every library uses the same."""

    def __init__(self, whole, desc, ranks, lib):
        self.arguments = []
        self.tensors = []
        for rank in range(ranks):
            found = _lib.Shard(), _lib.Shard()
            lib.ra_shard_rows(desc, rank, ranks, *found)
            rows = np.concatenate([np.arange(r.count) * r.step + r.start for r in found[0].rows if r.count])
            t = {name: np.ascontiguousarray(x[rows]) for name, x in whole.items()}
            for name in ("out", "dq", "dk", "dv"):
                t[name] = np.zeros_like(t["q"])
            t["lse"] = np.zeros((desc.heads, len(rows)), np.float32)
            views = {n: (x.ctypes.data, 0, desc.heads * desc.head_dim, desc.head_dim) for n, x in t.items()}
            views["lse"], views["none"] = (t["lse"].ctypes.data, 0, 1, len(rows)), (0, 0, 0, 0)
            self.tensors.append(t)
            self.arguments.append({
                name: ctypes.create_string_buffer(form.pack(*[x for part in parts.split() for x in views[part]], 0))
                for name, (form, parts) in BOTH.items()
            })


class Ring:
    def __init__(self, name, lib, desc, ranks, shards):
        self.name, self.lib, self.ranks, self.shards = name, lib, ranks, shards
        self.comms = (ctypes.c_void_p * ranks)()
        if lib.ra_comm_threads(ranks, self.comms):
            sys.exit(lib.ra_last_error().decode())
        self.pool = ThreadPoolExecutor(ranks)
        self.plans = [ctypes.c_void_p() for _ in range(ranks)]
        self.each(lambda r: lib.ra_plan_create(self.comms[r], desc, ctypes.byref(self.plans[r])))
        self.bucket = lib.ra_plan_bucket(self.plans[0])
        self.workspace = {name: lib.ra_plan_workspace(self.plans[0], name == "backward") for name in FLOPS}
        self.kernel = lib.ra_plan_kernel(self.plans[0]).decode()

    def each(self, work):
        def one(rank):
            if work(rank):
                raise RuntimeError(self.lib.ra_last_error().decode())

        for done in [self.pool.submit(one, rank) for rank in range(self.ranks)]:
            done.result()

    def call(self, name):
        """Seconds, and by rank those of computing and waiting."""
        function = getattr(self.lib, "ra_" + name)
        begin = time.perf_counter()
        self.each(lambda r: function(self.plans[r], self.shards.arguments[r][name]))
        seconds = time.perf_counter() - begin
        stats = [_lib.Stats(struct_size=ctypes.sizeof(_lib.Stats)) for _ in range(self.ranks)]
        for rank in range(self.ranks):
            self.lib.ra_stats(self.plans[rank], stats[rank])
        return {"seconds": seconds, "compute": [s.compute_seconds for s in stats], "wait": [s.wait_seconds for s in stats],
                "steps": stats[0].steps, "sent": max(s.bytes_sent for s in stats)}


def describe(lib, ranks, bucket):
    desc = _lib.Desc()
    lib.ra_attention_desc_init(desc)
    desc.dtype, desc.batch, desc.seq_q, desc.seq_k = _lib.BF16, 1, ARGS.seq, ARGS.seq
    desc.heads, desc.kv_heads, desc.head_dim, desc.causal = ARGS.heads, ARGS.heads, ARGS.head_dim, not ARGS.full
    desc.threads = max(1, ARGS.cores // ranks)
    if ARGS.kernel:
        desc.kernel = ARGS.kernel.encode()
    if ranks > 1:
        desc.layout, desc.schedule, desc.bucket = _lib.LAYOUT["contiguous" if ARGS.full else "zigzag"], _lib.SCHEDULE["ring"], bucket
        if bucket == 0 and ARGS.seq // ranks > 8192:
            desc.schedule = _lib.SCHEDULE["auto"]
    return desc


def make_rings():
    rng = np.random.default_rng(1)
    shape = ARGS.seq, ARGS.heads, ARGS.head_dim
    whole = {n: (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16) for n in ("q", "k", "v", "dout")}
    rings, libs = [], [load(path) for path in LIBRARIES]
    for ranks in [1] + [int(x) for x in ARGS.ranks.split(",")]:
        shards = Shards(whole, describe(libs[0], ranks, 0), ranks, libs[0])
        for number, lib in enumerate(libs):
            for bucket in [int(x) for x in ARGS.bucket.split(",")] if ranks > 1 else [0]:
                desc = describe(lib, ranks, bucket)
                rings.append(Ring(f"library {number + 1}", lib, desc, ranks, shards))
    return rings


def line(ring, name, calls, one):
    best = min(calls, key=lambda c: c["seconds"])
    times, s = [c["seconds"] for c in calls], best["seconds"]
    compute, wait = statistics.mean(best["compute"]), statistics.mean(best["wait"])
    pairs = ARGS.seq * ARGS.seq if ARGS.full else ARGS.seq * (ARGS.seq + 1) // 2
    row = dict(library=ring.name, ranks=ring.ranks, threads=max(1, ARGS.cores // ring.ranks), seq=ARGS.seq, bucket=ring.bucket,
               direction=name, kernel=ring.kernel, ms=1e3 * s, median_ms=1e3 * statistics.median(times),
               gflops=FLOPS[name] * ARGS.head_dim * ARGS.heads * pairs / s / 1e9, compute=compute / s, wait=wait / s,
               rest=1 - (compute + wait) / s, apart=max(best["compute"]) / compute - 1, steps=best["steps"], sent=best["sent"],
               workspace=ring.workspace[name], times=times)
    if one:
        row["ratio"] = min(c["seconds"] for c in one) / s
        row["median_ratio"] = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(one, calls))
    print(f"{name:8} {ring.name} {ring.ranks} x {row['threads']} bucket {ring.bucket:6} {row['ms']:8.1f} ms (median {row['median_ms']:8.1f}) "
          f"{row['gflops']:6.0f} GFLOP/s  " + (f"{row['ratio']:.3f}x (median {row['median_ratio']:.3f}x)  " if one else " " * 25)
          + f"compute {compute / s:.3f} wait {wait / s:.3f} rest {row['rest']:.3f} apart {row['apart']:.3f}", flush=True)
    return row


def main():
    rings, rows = make_rings(), []
    print(f"{'dense' if ARGS.full else 'causal zigzag'}, bf16, n = {ARGS.seq}, {ARGS.heads} heads, D = {ARGS.head_dim}, "
          f"{rings[0].kernel}, {ARGS.cores} cores")
    for number, path in enumerate(LIBRARIES):
        print(f"library {number + 1}: {path}")
    for ring in rings:
        ring.call("forward")  # backward needs its results; memory is touched
    for name in ARGS.passes.split(","):
        calls = [[] for _ in rings]
        end = time.monotonic() + ARGS.budget / len(ARGS.passes.split(","))
        for ring in rings if name == "backward" else []:
            ring.call(name)
        for turn in range(ARGS.rounds):
            for ring, found in zip(rings, calls):
                found.append(ring.call(name))
            if ARGS.budget and turn > 1 and time.monotonic() > end:
                break
        for ring, found in zip(rings, calls):
            rows.append(line(ring, name, found, calls[0] if ring is not rings[0] else None))
    if ARGS.json:
        Path(ARGS.json).write_text(json.dumps({"what": "ring threads", "made by": " ".join(sys.argv), "rows": rows}, indent=1))


main()
