#!/usr/bin/env python3
"""Gradients have the same bits every time: many runs of each shape, alone and beside other kernels on the same GPU.

    tests/gpu/same_bits.py [--runs 1000]        (RINGATTN_CUDA_LIBRARY names the module)

Every run is compared on the device with the first one, so that nothing waits between runs and blocks end in another order each
time. Exit status 1 if a run differs."""

import argparse
import sys
import time

from kit import BF16, DEVICE, F16, SMALL, backend, draw, torch  # isort: skip
from definition import Desc

BRANCHES = ((512, 1), (1024, 2), (2048, 4))
# Rows of all heads and of KV heads, D, what is computed, type: many tiles that add to the same rows, in milliseconds.
SHAPES = {
    "D=128 full": (4096, 4, 4, 128, Desc(), BF16),
    "D=128 causal": (4096, 8, 8, 128, Desc(causal=True), BF16),
    "D=64 causal, f16": (4096, 8, 8, 64, Desc(causal=True), F16),
    "D=128 causal, heads 8:2": (3000, 8, 2, 128, Desc(causal=True), BF16),
    "D=128 dilated, causal": (8192, 6, 6, 128, Desc(branches=BRANCHES, causal=True), BF16),
    "D=96 window 700": (4096, 4, 4, 96, Desc(causal=True, window=(700, 0)), BF16),
    "D=192 causal, heads 8:2": (3000, 8, 2, 192, Desc(causal=True), BF16),
    "D=256 full": (4096, 4, 4, 256, Desc(), BF16),
    "D=256 causal, f16": (4096, 4, 4, 256, Desc(causal=True), F16),
    "D=256 dilated, causal": (8192, 6, 6, 256, Desc(branches=BRANCHES, causal=True), BF16),
}


class Neighbour:
    """Products of several sizes on a stream of their own, one enqueued with every run: they take processors from it, never
    the same ones. On the stand-in there is none."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.matrices = [torch.randn(n, n, device="cuda").to(torch.bfloat16) for n in (512, 1024, 1536, 2048, 3072)]
        self.turn = 0

    def work(self):
        with torch.cuda.stream(self.stream):
            m = self.matrices[self.turn % len(self.matrices)]
            torch.mm(m, m)
        self.turn += 1


class Shape:
    def __init__(self, n, heads, kv_heads, d, desc, dtype):
        n = n // 8 if SMALL else n
        q, k, v, dout = (draw(1, n, h, d, dtype) for h in (heads, kv_heads, kv_heads, heads))
        out, lse = torch.zeros_like(q), torch.zeros(1, heads, n, device=DEVICE).transpose(1, 2)
        delta = torch.zeros(1, heads, n, device=DEVICE).transpose(1, 2)
        self.results = [torch.zeros_like(x) for x in (q, k, v)]
        backend.run(backend.prepare(q, k, v, desc, out, lse))
        backend.synchronize()
        backend.delta(backend.problem(q, k, desc), dout, out, None, delta)
        backend.synchronize()
        self.step = backend.prepare_backward(q, k, v, desc, lse, dout, delta, self.results)
        self.inputs = q, k, v, dout, out, lse, delta
        self.first = None
        self.differing = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def run(self):
        """Once more, and counts itself if it differs from the first."""
        for x in self.results:
            x.zero_()  # rows that no pair meets
        backend.run(self.step)
        if DEVICE == "cpu":
            backend.synchronize()
        if self.first is None:
            self.first = [x.clone() for x in self.results]
        self.differing += self.differs()

    def differs(self):
        pairs = zip(self.results, self.first)
        return torch.stack([(a.view(torch.int16) != b.view(torch.int16)).any() for a, b in pairs]).any()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each shape, alone and beside others; default %(default)s")
    options = parser.parse_args()
    torch.manual_seed(2)
    runs = differing = 0
    for name, shape in SHAPES.items():
        case = Shape(*shape)
        for neighbour in (None, Neighbour() if DEVICE == "cuda" else None)[: 1 + (DEVICE == "cuda")]:
            case.differing.zero_()
            begin = time.monotonic()
            for _ in range(options.runs):
                if neighbour:
                    neighbour.work()
                case.run()
            found = int(case.differing)
            where = "beside others" if neighbour else "alone"
            seconds = time.monotonic() - begin
            print(f"{name:24s} {backend.path:6s} {where:13s} {options.runs} runs, {found} differ ({seconds:.1f} s)", flush=True)
            runs, differing = runs + options.runs, differing + found
        if not all(x.count_nonzero() for x in case.first):
            sys.exit(f"{name}: a gradient is zero everywhere, so that its runs say nothing")
        case.results[1].view(torch.int16)[0, 5, 1, 3] ^= 1
        if not case.differs():
            sys.exit(f"{name}: one changed bit was not found")
    print(f"{runs} runs, {differing} differ from the first of their shape")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
