#!/usr/bin/env python3
"""ringattn against PyTorch's scaled_dot_product_attention on this CPU, alternating in one run.

Both get the same numbers and threads. PyTorch gets contiguous [B, H, N, D] and its default backend; the dilated pattern is computed the
careful way: strided views of segments into SDPA, results scattered into zeros. Medians; GFLOP/s count attended pairs only (4 D a pair
forward, 10 D backward). On a shared machine only the ratios mean anything.

    RINGATTN_LIBRARY=build/libringattn.so PYTHONPATH=python python3 bench/cpu_peers.py --json peers.json --plot peers.png
    ... --quick                  a few cases in under a minute
    ... --avx2                   ours and PyTorch both held to AVX2
"""
import argparse
import json
import os
import platform
import statistics
import sys
import time

HOLD_TO_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "RINGATTN_KERNEL": "avx2"}
SEGMENTS, RATES = (2048, 4096, 8192), (1, 2, 4)


def numbers(text):
    return [int(part) for part in text.split(",")]


def words(text):
    return text.split(",")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, default=["dense", "causal", "dilated"], help="dense, causal, dilated, dilated-causal, ranks")
    parser.add_argument("--seq", type=numbers, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--dtypes", type=words, default=["f32", "bf16"])
    parser.add_argument("--heads", type=numbers, default=[1], help="of dense cases; dilated ones take 3")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--passes", type=words, default=["forward", "backward"])
    parser.add_argument("--seconds", type=float, default=4.0, help="for one row of the table, about")
    parser.add_argument("--skip-over", type=float, default=60.0, help="skip PyTorch's side when one call takes longer than this")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.add_argument("--plot")
    options = parser.parse_args()
    if options.quick:
        options.seq, options.seconds, options.cases, options.threads = [4096], 1.0, ["dense", "causal"], [1]
    return options


def cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    try:
        import subprocess
        for line in subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines():
            if line.startswith("Model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


class Case:
    """One row: inputs, and a call of each side for forward and backward."""

    def __init__(self, kind, dtype, seq, heads, dim, threads, kernel):
        import torch
        import ringattn
        self.kind, self.seq, self.heads, self.dim, self.threads = kind, seq, heads, dim, threads
        self.causal = "causal" in kind
        self.dilated = kind.startswith("dilated")
        self.torch, self.ringattn = torch, ringattn
        generator = torch.Generator().manual_seed(1)
        kind_of = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        make = lambda: torch.randn(1, seq, heads, dim, generator=generator).to(kind_of)
        self.ours = [make() for _ in range(3)]
        self.dout = make()
        self.theirs = [x.transpose(1, 2).contiguous() for x in self.ours]
        self.their_dout = self.dout.transpose(1, 2).contiguous()
        self.options = dict(is_causal=self.causal, threads=threads, kernel=kernel)
        if self.dilated:
            self.options.update(segment_lengths=SEGMENTS, dilation_rates=RATES)
        if kind == "ranks":
            self.options.update(threads=1, group=2)
        torch.set_num_threads(threads)

    def pairs(self):
        if not self.dilated:
            return self.heads * (self.seq * (self.seq + 1) // 2 if self.causal else self.seq ** 2)
        total = 0
        for branch, (segment, rate) in enumerate(zip(SEGMENTS, RATES)):
            rows = len(range(branch % rate, segment, rate))
            pairs = rows * (rows + 1) // 2 if self.causal else rows * rows
            total += self.heads // len(SEGMENTS) * (self.seq // segment) * pairs
        return total

    def our_call(self, *qkv):
        return self.ringattn.attention(*qkv, **self.options)

    def their_call(self, q, k, v):
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        if self.kind == "ranks":  # the other side is this library, on one rank of two workers
            return self.ringattn.attention(q, k, v, threads=2)
        if not self.dilated:
            return sdpa(q, k, v, is_causal=self.causal)
        out = self.torch.zeros_like(q)
        share = self.heads // len(SEGMENTS)
        for branch, (segment, rate) in enumerate(zip(SEGMENTS, RATES)):
            heads = slice(branch * share, (branch + 1) * share)
            view = lambda x: x[0, heads].unflatten(1, (self.seq // segment, segment))[:, :, branch % rate::rate]
            view(out).copy_(sdpa(view(q), view(k), view(v), is_causal=self.causal))
        return out

    def calls(self, direction):
        torch = self.torch
        theirs = self.ours if self.kind == "ranks" else self.theirs
        if direction == "forward":
            def ours():
                with torch.no_grad():
                    return self.our_call(*self.ours)

            def peer():
                with torch.no_grad():
                    return self.their_call(*theirs)
            return ours, peer
        result = []
        for inputs, call, dout in ((self.ours, self.our_call, self.dout), (theirs, self.their_call, self.dout if theirs is self.ours else self.their_dout)):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = call(*leaves)
            result.append(lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(out, leaves, dout, retain_graph=True))
        return result

    def check(self):
        """Both sides agree: a fast wrong answer is no answer."""
        with self.torch.no_grad():
            theirs = self.ours if self.kind == "ranks" else self.theirs
            a, b = self.our_call(*self.ours).float(), self.their_call(*theirs).float()
            b = b if theirs is self.ours else b.transpose(1, 2)
            error = (a - b).abs().max().item()
        limit = 2e-2 if self.ours[0].dtype != self.torch.float32 else 1e-5
        if not error <= limit:
            sys.exit(f"{self.kind} n={self.seq} d={self.dim}: the two sides differ by {error:.3g}")


def measure(ours, peer, seconds, skip_over):
    """Medians of alternating calls."""
    def timed(call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    first = [timed(ours), timed(peer)]
    if first[1] > skip_over:
        return first
    times, stop = ([], []), time.perf_counter() + seconds
    while len(times[0]) < 3 or (time.perf_counter() < stop and len(times[0]) < 200):
        times[0].append(timed(ours))
        times[1].append(timed(peer))
        if sum(first) > seconds and len(times[0]) >= 2:
            break
    return [statistics.median(side) for side in times]


def main():
    options = arguments()
    if options.avx2 and any(os.environ.get(name) != value for name, value in HOLD_TO_AVX2.items()):
        os.execve(sys.executable, [sys.executable] + sys.argv, {**os.environ, **HOLD_TO_AVX2})
    import torch
    import ringattn
    from ringattn import _lib
    machine = f"{cpu_name()}, {os.cpu_count()} CPUs; PyTorch {torch.__version__}, ringattn {ringattn.__version__}"
    if options.avx2:
        machine += ", both held to AVX2"
    print(machine, flush=True)
    rows = []
    for case in options.cases:
        for dtype in options.dtypes:
            for dim in options.dims:
                for seq in options.seq:
                    if case.startswith("dilated") and seq % SEGMENTS[-1]:
                        continue
                    for heads in [3] if case.startswith("dilated") else options.heads:
                        for threads in [2] if case == "ranks" else options.threads:
                            one = Case(case, dtype, seq, heads, dim, threads, options.kernel)
                            one.check()
                            for direction in options.passes:
                                seconds = measure(*one.calls(direction), options.seconds, options.skip_over)
                                flops = (4 if direction == "forward" else 10) * dim * one.pairs()
                                row = dict(case=case, dtype=dtype, seq=seq, heads=heads, dim=dim, threads=threads, direction=direction,
                                           ringattn=flops / seconds[0] / 1e9, peer=flops / seconds[1] / 1e9, ratio=seconds[1] / seconds[0])
                                rows.append(row)
                                print("{case:14} {dtype:4} n={seq:<6} h={heads} d={dim:<3} threads={threads} {direction:8} ringattn {ringattn:8.1f} "
                                      "peer {peer:8.1f} GFLOP/s   {ratio:6.2f}x".format(**row), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(machine=machine, date=time.strftime("%Y-%m-%d"), rows=rows), file, indent=1)
    if options.markdown:
        with open(options.markdown, "w") as file:
            file.write(markdown(machine, rows))
    if options.plot:
        plot(machine, rows, options.plot)


def markdown(machine, rows):
    lines = [f"{machine}; {time.strftime('%Y-%m-%d')}. GFLOP/s of useful work.", "",
             "| case | dtype | n | heads | D | threads | pass | ringattn | PyTorch | ratio |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        lines.append("| {case} | {dtype} | {seq} | {heads} | {dim} | {threads} | {direction} | {ringattn:.0f} | {peer:.0f} | {ratio:.2f}x |".format(**row))
    return "\n".join(lines) + "\n"


def plot(machine, rows, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    groups = sorted({(row["dtype"], row["dim"], row["direction"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.4), sharex=True, squeeze=False)
    for axis, group in zip(axes[0], groups):
        mine = [row for row in rows if (row["dtype"], row["dim"], row["direction"]) == group]
        for case, heads, threads in sorted({(row["case"], row["heads"], row["threads"]) for row in mine}):
            line = sorted((row["seq"], row["ratio"]) for row in mine if (row["case"], row["heads"], row["threads"]) == (case, heads, threads))
            axis.plot(*zip(*line), marker="o", markersize=3, label=f"{case}, {threads} thr")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title("{} D={} {}".format(*group), fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("times PyTorch")
    axes[0][0].legend(fontsize=6)
    figure.suptitle(machine, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
