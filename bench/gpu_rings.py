#!/usr/bin/env python3
"""Rings on one GPU: 2, 4 and 8 ranks beside one, forward and backward, dense and zigzag causal, bf16.

    bench/gpu_rings.py --out NAME [--cases ring,slow,processes,alone]       (prints a page, writes NAME.json)

    ring        speed of ranks that are threads of one process, time of the host, memory of a rank, error against float64
    slow        the same ring when messages take 0.8 of the time of a step (RINGATTN_LANE_RATE): how much of that is hidden
    alone       the same of a rank that has the GPU for itself, whose peers' rows are made there
    processes   two processes that share the GPU, by CUDA IPC, beside two ranks of one process

RINGATTN_LIBRARY and PYTHONPATH say where the library and the package are, --program where the command line is. Rings take turns
in one process; times are the GPU's, which is kept busy until the hosts have enqueued a call. What one GPU cannot show: NVLink,
networks, several GPUs' clocks. bench/report.py makes the page; bench/README.md tells the fields of the file."""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time

SHARE = 0.8  # of a step's time, in which its messages arrive by the slow lane
SLOW_RANKS = 4


def reference(whole, head, pattern):
    """out, dq, dk and dv of a head in float64, block by block of queries."""
    import torch

    q, k, v, dout = (whole[name][0, :, head].double() for name in ("q", "k", "v", "dout"))
    n, scale = len(q), q.shape[1] ** -0.5
    found = {"out": torch.empty_like(q), "dq": torch.empty_like(q), "dk": torch.zeros_like(q), "dv": torch.zeros_like(q)}
    for begin in range(0, n, 1024):
        block = slice(begin, min(begin + 1024, n))
        keys = slice(0, block.stop if pattern == "causal" else n)
        s = scale * q[block] @ k[keys].T
        if pattern == "causal":
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu_(begin + 1), float("-inf"))
        p = torch.softmax(s, -1)
        del s
        found["out"][block] = p @ v[keys]
        delta = (dout[block] * found["out"][block]).sum(-1, keepdim=True)
        found["dv"][keys] += p.T @ dout[block]
        ds = p * (dout[block] @ v[keys].T - delta) * scale
        found["dq"][block] = ds @ k[keys]
        found["dk"][keys] += ds.T @ q[block]
    return found


def device_free(rings):
    """Bytes that the driver has left, without what torch keeps for itself."""
    import torch

    if not rings.GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Bench:
    def __init__(self, options):
        import rings
        import torch

        self.rings, self.torch, self.options, self.rows = rings, torch, options, []
        self.stream = rings.Stream()
        torch.manual_seed(1)
        shape = 1, options.seq, options.heads, options.head_dim
        self.whole = {
            name: torch.randn(shape, device=rings.PLACE).to(torch.bfloat16) for name in ("q", "k", "v", "dout")
        }

    def add(self, group, pattern, ranks, **fields):
        o = self.options
        row = {"group": group, "pattern": pattern, "ranks": ranks, "n": o.seq, "heads": o.heads, "head_dim": o.head_dim}
        self.rows.append({**row, "dtype": "bf16", **fields})
        shown = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in fields.items()]
        print(f"{group:10s} {pattern:6s} {ranks} ranks  " + ", ".join(shown), flush=True)

    def tflops(self, pattern, name, ms):
        o = self.options
        work = self.rings.PASSES[name] * o.head_dim * o.heads * self.rings.pairs(o.seq, pattern)
        return work / ms / 1e9

    # ------------------------------------------------------------------------------------------------------------- cases

    def ring(self):
        for pattern in self.options.patterns:
            opened = [self.opened(pattern, ranks) for ranks in self.options.ranks]
            self.add_errors(opened)
            for name in self.options.passes:
                found = self.rings.take_turns(opened, name, self.options.turns)
                for ring, sample in zip(opened, found):
                    self.add_ring(ring, name, sample, found[0]["ms"])
            for ring in opened:
                ring.close()

    def add_errors(self, opened):
        """Of one head. No tensor may outlive this function: torch would keep the whole segment that it lies in, and tensors of
        the next rings that find room there would be missing in what the driver counts."""
        head = self.options.heads - 1
        right = reference(self.whole, head, opened[0].pattern)
        for ring in opened:
            errors = {name: ring.whole(name, head).double() - right[name] for name in right}
            self.add("error", ring.pattern, ring.count, rms={name: e.square().mean().sqrt().item() for name, e in errors.items()})

    def opened(self, pattern, ranks):
        """A ring that has made its first calls, and what memory that took."""
        if ranks == 1:  # loads the kernels, which takes memory of the device once
            first = self.rings.Ring(self.stream, self.whole, pattern, 1)
            for name in self.rings.PASSES:
                first.run(name)
            first.close()
        before = device_free(self.rings)
        ring = self.rings.Ring(self.stream, self.whole, pattern, ranks, self.options.bucket)
        for name in self.rings.PASSES:
            ring.run(name)
        self.stream.synchronize()
        taken = before - device_free(self.rings)
        planned = ring.planned_bytes()
        allocations = len(ring.ranks[0].tensors) + 1  # and the workspace
        self.add(
            "memory",
            pattern,
            ranks,
            planned_bytes=max(planned),
            measured_bytes=ring.measured_bytes(),
            planned_total=sum(planned),
            device_total=taken if self.rings.GPU else None,
            granularity=ranks * allocations * (2 << 20),
        )
        return ring

    def add_ring(self, ring, name, sample, ms_of_one):
        counted = [rank.statistics() for rank in ring.ranks]
        steps = max(1, max(stats.steps for stats in counted))
        self.add(
            "ring",
            ring.pattern,
            ring.count,
            **{"pass": name},
            ms=sample["ms"],
            tflops=self.tflops(ring.pattern, name, sample["ms"]),
            against_one=ms_of_one / sample["ms"],
            bytes_sent=max(stats.bytes_sent for stats in counted),
            steps=steps,
            bucket=self.rings.lib.ra_plan_bucket(ring.ranks[0].plan),
            host_us=1e6 * sample["host"] / steps,
        )

    def slow(self):
        for pattern in self.options.patterns:
            fast = self.rings.Ring(self.stream, self.whole, pattern, SLOW_RANKS, self.options.bucket)
            fast.run("forward")  # backward needs its results
            for name in self.options.passes:
                (alone,) = self.rings.take_turns([fast], name, 2)
                sent = max(rank.statistics().bytes_sent for rank in fast.ranks)
                rate = slow_rate(sent, SLOW_RANKS, 1e-3 * alone["ms"])
                os.environ["RINGATTN_LANE_RATE"] = repr(rate)
                slow = self.rings.Ring(self.stream, self.whole, pattern, SLOW_RANKS, self.options.bucket)
                slow.run("forward")
                del os.environ["RINGATTN_LANE_RATE"]
                compute, total = (found["ms"] for found in self.rings.take_turns([fast, slow], name, self.options.turns))
                slow.close()
                self.add_slow(pattern, name, rate, compute, total, False)
            fast.close()

    def add_slow(self, pattern, name, rate, compute, total, alone):
        fields = dict(rate=rate, share=SHARE, compute_ms=compute, ms=total, ratio=total / compute, alone=alone)
        self.add("slow lane", pattern, SLOW_RANKS, **{"pass": name}, **fields)

    def bench(self, pattern, name, *words, launcher=(), variables=None, at_once=1):
        """What the command line measures, {ms, bytes_sent}; of as many processes `at_once` that one which took longest."""
        o, short = self.options, {"forward": "fwd", "backward": "bwd"}[name]
        shape = ["--seq", o.seq, "--heads", o.heads, "--head-dim", o.head_dim, "--dtype", "bf16", "--device", "cuda"]
        shape += ["--pass", short, "--repeat", o.turns, "--json", *(["--causal"] if pattern == "causal" else [])]
        command = list(map(str, [*launcher, o.program, "bench", *shape, *words]))
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        environment, pipe = {**os.environ, **root, **(variables or {})}, subprocess.PIPE
        started = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) for _ in range(at_once)]
        found = []
        for process in started:
            text, said = process.communicate()
            if process.returncode != 0:
                sys.exit(f"{' '.join(command)}: exit status {process.returncode}: {said.strip() or text.strip()}")
            found.append(json.loads(text)[short])
        return max(found, key=lambda one: one["ms"])

    def ring_options(self, pattern):
        bucket = ("--bucket", self.options.bucket) if self.options.bucket else ()
        return "--schedule", "ring", "--layout", self.rings.LAYOUTS[pattern], *bucket

    def processes(self):
        launcher = shutil.which("mpirun")
        if not launcher:
            print("processes: left out, there is no mpirun")
            return
        for pattern in self.options.patterns:
            ring = self.ring_options(pattern)
            for name in self.options.passes:
                times = {"ms": [], "threads_ms": []}
                for _ in range(self.options.rounds):
                    times["threads_ms"].append(self.bench(pattern, name, *ring, "--ring-size", 2)["ms"])
                    times["ms"].append(self.bench(pattern, name, *ring, launcher=(launcher, "-n", "2"))["ms"])
                median = {key: statistics.median(values) for key, values in times.items()}
                fields = {**median, "ratio": median["threads_ms"] / median["ms"], "slicing": self.slicing(pattern, name)}
                self.add("processes", pattern, 2, **{"pass": name}, **fields)

    def slicing(self, pattern, name):
        """What the GPU does in all while two processes that know nothing of each other share it, over what it does for one."""
        half = "--seq", self.options.seq // 2, "--repeat", 4 * self.options.turns
        return 2 * self.bench(pattern, name, *half)["ms"] / self.bench(pattern, name, *half, at_once=2)["ms"]

    def alone(self):
        for pattern in self.options.patterns:
            words = *self.ring_options(pattern), "--ring-size", SLOW_RANKS, "--rank", 1
            for name in self.options.passes:
                fast = self.bench(pattern, name, *words)
                rate = slow_rate(fast["bytes_sent"], SLOW_RANKS, 1e-3 * fast["ms"])
                slow = self.bench(pattern, name, *words, variables={"RINGATTN_LANE_RATE": repr(rate)})
                self.add_slow(pattern, name, rate, fast["ms"], slow["ms"], True)


def slow_rate(sent, ranks, seconds):
    """GB/s at which a step's messages take SHARE of its time. Of as many steps as ranks all but the last are followed by an
    arrival."""
    return sent / (SHARE * seconds * (ranks - 1) / ranks) / 1e9


def machine(rings):
    import torch

    driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null").read().strip()
    found = {"gpu": torch.cuda.get_device_name() if rings.GPU else "stand-in on " + platform.machine()}
    found |= {"driver": driver or "none", "torch": torch.__version__, "cuda": torch.version.cuda or "none", "python": platform.python_version()}
    if "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="ring,slow,alone,processes", help="default %(default)s")
    parser.add_argument("--seq", type=int, default=131072, help="default %(default)s")
    parser.add_argument("--heads", type=int, default=16, help="default %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="default %(default)s")
    parser.add_argument("--ranks", default="1,2,4,8", help="rings beside one rank, which comes first; default %(default)s")
    parser.add_argument("--bucket", type=int, default=0, help="rows of a bucket, default: as the plan sees fit")
    parser.add_argument("--patterns", default="full,causal", help="default %(default)s")
    parser.add_argument("--passes", default="forward,backward", help="that are timed, default %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="calls of which each time is the median, default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="the same of processes, of --turns calls each, default %(default)s")
    parser.add_argument("--program", default="build/ringattn", help="default %(default)s")
    parser.add_argument("--out", metavar="NAME", help="writes NAME.json")
    options = parser.parse_args()
    options.ranks = [int(word) for word in options.ranks.split(",")]
    options.patterns, options.passes = options.patterns.split(","), options.passes.split(",")
    if options.ranks[0] != 1:
        sys.exit("--ranks: the first must be 1, with which the others are compared")
    import report
    import rings

    bench = Bench(options)
    made_by = " ".join(["bench/gpu_rings.py", *sys.argv[1:]])
    result = {"what": "rings", "machine": machine(rings), "date": time.strftime("%Y-%m-%d"), "made by": made_by}
    result["rows"] = bench.rows
    report.measure(bench, options.cases.split(","), result, options.out)


if __name__ == "__main__":
    main()
