#!/usr/bin/env python3
"""ringattn beside PyTorch's scaled_dot_product_attention on this CPU: one process, same numbers, same threads, taking turns, medians.

    RINGATTN_LIBRARY=build/libringattn.so PYTHONPATH=python python3 bench/cpu_peers.py --json peers.json
    ... --quick                         a few rows in half a minute
    ... --budget 240                    the whole grid within 240 seconds: less time a row, and rows that cannot fit are left out
    ... --avx2                          ours and PyTorch both held to AVX2

bench/report.py makes the page and the plot of the JSON of one run or several.

Cases, each for every --seq, --dims, --dtypes, --threads and --passes:
    dense, causal                       PyTorch gets contiguous [B, H, N, D] and its default backend
    dilated, dilated-causal             branches 2048/1, 4096/2, 8192/4; PyTorch the careful way: strided views of segments into SDPA,
                                        results copied to their rows
and of this library against itself, where the peer is
    own                                 dense attention of as many rows as a dilated segment has (w/r = 1024), for each useful flop
    ranks                               one rank of two workers, against two ranks of one (n = 32768)
    scaling                             one thread, against two, with one head (n = 4096 and 16384): both on the same two cores, where
                                        one thread runs on each in turn; its speed is the mean of both, since cores of a shared
                                        machine are not alike
    overhead                            PyTorch at n = 1: microseconds of a whole call from Python, smallest of many

With several threads each call begins after 20 ms of rest, since PyTorch's threads stay busy waiting for 10 ms after a call.
GFLOP/s count attended pairs only, 4 D a pair forward, 10 D backward. On a shared machine only the ratios of a row mean anything."""
import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time

HOLD_TO_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "RINGATTN_KERNEL": "avx2"}
BRANCHES = ((2048, 1), (4096, 2), (8192, 4))
REST = 0.02  # seconds: PyTorch's threads keep their processors busy for half of that after a call
CASES = ("dense", "causal", "dilated", "dilated-causal", "own", "ranks", "scaling", "overhead")


def numbers(text):
    return [int(part) for part in text.split(",")]


def words(text):
    return text.split(",")


def cases(text):
    chosen = words(text)
    for name in chosen:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"no case {name!r}: {', '.join(CASES)}")
    return chosen


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=cases, default=list(CASES), metavar="NAME,...")
    parser.add_argument("--seq", type=numbers, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--dtypes", type=words, default=["f32", "bf16"])
    parser.add_argument("--heads", type=numbers, default=[1], help="of dense cases; dilated ones have 3")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--passes", type=words, default=["forward", "backward"])
    parser.add_argument("--seconds", type=float, default=4.0, help="for one row of the table, about")
    parser.add_argument("--budget", type=float, help="seconds for all rows together")
    parser.add_argument("--longest", type=float, default=20.0, help="leave a row out when one call would take longer (seconds)")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.quick:
        options.seq, options.dims, options.threads, options.seconds = [2048], [64], [1], 1.0
        options.cases = ["dense", "causal", "scaling", "overhead"]
    return options


def cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        for line in subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines():
            if line.startswith("Model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


class Case:
    """Inputs, and a call of each side for forward and backward. Sides are "ringattn" and "peer"."""

    def __init__(self, kind, dtype, seq, heads, dim, threads, kernel="auto"):
        import ringattn
        import torch

        self.kind, self.seq, self.heads, self.dim, self.threads = kind, seq, heads, dim, threads
        self.causal, self.dilated = "causal" in kind, kind.startswith("dilated")
        self.torch, self.ringattn = torch, ringattn
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        self.options = dict(is_causal=self.causal, threads=threads, kernel=kernel)
        self.ours = self.inputs(seq)
        self.own_peer = None  # options of this library's other side
        if self.dilated:
            self.options.update(segment_lengths=[w for w, _ in BRANCHES], dilation_rates=[r for _, r in BRANCHES])
        if kind == "own":
            self.options.update(segment_lengths=[4096], dilation_rates=[4])
            self.own_peer = dict(threads=threads, kernel=kernel)
        if kind == "ranks":
            self.options.update(threads=1, group=2)
            self.own_peer = dict(threads=2, kernel=kernel)
        if kind == "scaling":
            self.options.update(threads=2)
            self.own_peer = dict(threads=1, kernel=kernel)
        if kind == "own":  # as many pairs as the dilated side has: heads instead of segments
            self.theirs = self.inputs(1024, heads * seq // 4096)
        elif self.own_peer:
            self.theirs = self.ours
        else:
            self.theirs = [x.transpose(1, 2).contiguous() for x in self.ours]
        torch.set_num_threads(threads)

    def inputs(self, seq, heads=None):
        """q, k, v and dout."""
        generator = self.torch.Generator().manual_seed(1)
        shape = (1, seq, heads or self.heads, self.dim)
        return [self.torch.randn(shape, generator=generator).to(self.dtype) for _ in range(4)]

    def pairs(self):
        if self.kind == "own":
            return self.heads * self.seq // 4096 * 1024**2
        if not self.dilated:
            return self.heads * (self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2)
        total = 0
        for branch, (segment, rate) in enumerate(BRANCHES):
            rows = len(range(branch % rate, segment, rate))
            pairs = rows * (rows + 1) // 2 if self.causal else rows * rows
            total += self.heads // len(BRANCHES) * (self.seq // segment) * pairs
        return total

    def our_call(self, q, k, v):
        return self.ringattn.attention(q, k, v, **self.options)

    def their_call(self, q, k, v):
        if self.own_peer:
            return self.ringattn.attention(q, k, v, **self.own_peer)
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        if not self.dilated:
            return sdpa(q, k, v, is_causal=self.causal)
        out = self.torch.zeros_like(q)
        share = self.heads // len(BRANCHES)
        for branch, (segment, rate) in enumerate(BRANCHES):
            heads = slice(branch * share, (branch + 1) * share)

            def view(x):
                return x[0, heads].unflatten(1, (self.seq // segment, segment))[:, :, branch % rate :: rate]

            view(out).copy_(sdpa(view(q), view(k), view(v), is_causal=self.causal))
        return out

    def calls(self, direction):
        """A function without arguments for each side."""
        torch, result = self.torch, []
        for call, (*qkv, dout) in ((self.our_call, self.ours), (self.their_call, self.theirs)):
            if direction == "forward":

                def forward(call=call, qkv=qkv):
                    with torch.no_grad():
                        return call(*qkv)

                result.append(forward)
            else:
                leaves = [x.detach().clone().requires_grad_() for x in qkv]
                out = call(*leaves)
                result.append(lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(out, leaves, dout, retain_graph=True))
        return result

    def check(self):
        """Both sides agree: a fast wrong answer is no answer."""
        if self.kind == "own":
            return
        with self.torch.no_grad():
            ours, theirs = self.our_call(*self.ours[:3]).float(), self.their_call(*self.theirs[:3]).float()
        error = (ours - (theirs if self.own_peer else theirs.transpose(1, 2))).abs().max().item()
        if not error <= (1e-5 if self.dtype == self.torch.float32 else 2e-2):
            sys.exit(f"{self.kind} n={self.seq} d={self.dim}: the two sides differ by {error:.3g}")


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Cores:
    """Two cores for all threads of this process, and for the calling one either of them."""

    def __enter__(self):
        self.before = os.sched_getaffinity(0)
        self.two = sorted(self.before)[:2]
        self.let(self.two, os.listdir("/proc/self/task"))
        return self

    def let(self, cores, threads=(0,)):
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)

    def __exit__(self, *_):
        self.let(self.before, os.listdir("/proc/self/task"))


def measure(ours, peer, seconds, rest):
    """Medians of calls that take turns, after one of each that does not count. Before each, `rest` seconds of nothing."""
    stop = time.perf_counter() + seconds
    first, times = timed(ours) + timed(peer) + 2 * rest, ([], [])
    while not times[0] or (time.perf_counter() + first < stop and len(times[0]) < 60):
        for side, call in enumerate((ours, peer)):
            time.sleep(rest)
            times[side].append(timed(call))
    return [statistics.median(side) for side in times]


def measure_scaling(two, one, seconds):
    """The same for two threads against one, which runs on each of their cores in turn."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        return measure(two, one, seconds, 0)
    stop = time.perf_counter() + seconds
    two()
    one()
    with Cores() as cores:
        both, alone = [], ([], [])
        while len(both) < 4 or (time.perf_counter() < stop and len(both) < 120):
            core = len(both) % 2
            cores.let(cores.two)
            both.append(timed(two))
            cores.let([cores.two[core]])
            alone[core].append(timed(one))
    return [statistics.median(both), statistics.harmonic_mean([statistics.median(times) for times in alone])]


def overhead(dtype, dim, threads, kernel):
    """Microseconds of a call at n = 1, each side."""
    one = Case("overhead", dtype, 1, 1, dim, threads, kernel)
    ours, peer = one.calls("forward")
    return [1e6 * min(timed(call) for _ in range(3000)) for call in (ours, peer)]


def planned(options):
    """(case, dtype, dim, seq, heads, threads, direction) of each row, small ones first, so that they tell how long the others take."""
    found = []
    for case in options.cases:
        scaling = [seq for seq in options.seq if 4096 <= seq <= 16384] or [4096]
        for seq in {"own": [16384], "ranks": [32768], "scaling": scaling, "overhead": [1]}.get(case, options.seq):
            if case.startswith("dilated") and seq % BRANCHES[-1][0]:
                continue
            for dtype in options.dtypes:
                for dim in options.dims:
                    for heads in [3] if case.startswith("dilated") else [1] if case not in ("dense", "causal") else options.heads:
                        for threads in [2] if case in ("ranks", "scaling") else [1] if case == "overhead" else options.threads:
                            for direction in ["forward"] if case == "overhead" else options.passes:
                                found.append((case, dtype, dim, seq, heads, threads, direction))
    return sorted(found, key=lambda row: 0 if row[0] in ("own", "overhead") else row[3])


def measured(options):
    """The rows of the table, and what was left out."""
    rows, left_out, rates, held, plan = [], [], {}, (None, None), planned(options)
    start = time.perf_counter()
    for index, key in enumerate(plan):
        case, dtype, dim, seq, heads, threads, direction = key
        seconds = most = options.seconds
        if options.budget:
            share = (options.budget - (time.perf_counter() - start)) / (len(plan) - index)
            seconds, most = min(seconds, share), 8 * share
        names = dict(case=case, dtype=dtype, seq=seq, heads=heads, dim=dim, threads=threads, direction=direction)
        if case == "overhead":
            ours, peer = overhead(dtype, dim, threads, options.kernel)
            rows.append(dict(names, unit="us", ringattn=ours, peer=peer, ratio=peer / ours))
        else:
            if held[0] != key[:6]:
                held = (key[:6], Case(case, dtype, seq, heads, dim, threads, options.kernel))
            one = held[1]
            flops = (4 if direction == "forward" else 10) * dim * one.pairs()
            # by the slower side of a smaller row of this kind; two calls a side at least, and backward has a forward before it
            like = (one.own_peer is None, dtype, dim, threads, direction)
            call = flops / rates.get(like, 5e10)
            if call > options.longest or (options.budget and (4 if direction == "forward" else 5) * call > most):
                left_out.append(dict(names, seconds=call))
                print("{case:14} {dtype:4} n={seq:<6} h={heads} d={dim:<3} threads={threads} {direction:8} left out: about "
                      "{seconds:.1f} s a call".format(**left_out[-1]), flush=True)
                continue
            if direction == options.passes[0] and call < 0.5:
                one.check()
            sides = one.calls(direction)
            if case == "scaling":
                times = measure_scaling(*sides, seconds)
            else:
                times = measure(*sides, seconds, REST if threads > 1 and one.own_peer is None else 0)
            rates[like] = flops / max(times)
            rows.append(dict(names, unit="gflops", ringattn=flops / times[0] / 1e9, peer=flops / times[1] / 1e9, ratio=times[1] / times[0]))
        print("{case:14} {dtype:4} n={seq:<6} h={heads} d={dim:<3} threads={threads} {direction:8} ringattn {ringattn:8.1f} "
              "peer {peer:8.1f} {name}   {ratio:6.2f}x".format(name={"us": "us", "gflops": "GFLOP/s"}[rows[-1]["unit"]], **rows[-1]),
              flush=True)
    return rows, left_out


def main():
    options = arguments()
    if options.avx2 and any(os.environ.get(name) != value for name, value in HOLD_TO_AVX2.items()):
        os.execve(sys.executable, [sys.executable] + sys.argv, {**os.environ, **HOLD_TO_AVX2})
    try:
        import torch
    except ImportError:
        sys.exit("bench/cpu_peers.py measures against PyTorch, which is missing here (pip install torch)")
    import ringattn

    machine = f"{cpu_name()}, {os.cpu_count()} CPUs; PyTorch {torch.__version__}, ringattn {ringattn.__version__}"
    if options.avx2:
        machine += ", both held to AVX2"
    print(machine, flush=True)
    rows, left_out = measured(options)
    made_by = " ".join(["bench/cpu_peers.py", *sys.argv[1:]])
    result = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "made by": made_by, "rows": rows, "left_out": left_out}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
