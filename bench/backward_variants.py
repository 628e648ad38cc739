#!/usr/bin/env python3
"""Builds of Hopper's backward kernel side by side: which of them is right, and how fast each is.

    bench/backward_variants.py check LIBRARY                         (exit status 0: right, in order, the same bits again)
    bench/backward_variants.py time NAME=LIBRARY ... [--repeat 10]   (one table, TFLOP/s)
    bench/backward_variants.py clocks LIBRARY [--dim 128] [--tokens 8192] [--causal]     (a build with RA_BACK_CLOCKS)

A library is a libringattn_cuda.so whose sm90_backward.cu was compiled with other choices of sm90_tuning.cuh."""

import argparse
import os
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "gpu"))

# What the clocks of sm90_clocks.cuh are called, in the order of its enums.
COMPUTES = (
    "begin,wait q,wait dout,wait rows,wait S,P,wait dP,dS,wait dS room,store dS,wait dS full,issue dQ dK,wait dQ,"
    "wait dQ room,store dQ,wait dK (order 2: dV)"
).split(",")
ADDS = "begin,wait dQ,wait turn,read,complete,tell".split(",")
BLOCKS, ROLES, TURNS, PHASES = 132, 4, 192, 16


class Case:
    """Tensors of a backward pass, and a way to run it with any library."""

    def __init__(self, n, h, hk, d, desc, dtype, device="cuda"):
        import torch

        torch.manual_seed(n * 1000 + d)
        self.desc = desc
        self.q, self.dout = (torch.randn(1, n, h, d, device=device).to(dtype) for _ in range(2))
        self.k, self.v = (torch.randn(1, n, hk, d, device=device).to(dtype) for _ in range(2))
        self.lse = torch.empty(1, h, n, device=device).transpose(1, 2)
        self.delta = torch.empty(1, h, n, device=device).transpose(1, 2)

    def forward(self, backend):
        import torch

        out = torch.empty_like(self.q)
        backend.run(backend.prepare(self.q, self.k, self.v, self.desc, out, self.lse))
        backend.delta(backend.problem(self.q, self.k, self.desc), self.dout, out, None, self.delta)
        backend.synchronize()

    def prepare(self, backend):
        """(step, results); the results are poisoned."""
        import torch

        results = [torch.full_like(t, float("nan")) for t in (self.q, self.k, self.v)]
        return backend.prepare_backward(self.q, self.k, self.v, self.desc, self.lse, self.dout, self.delta, results), results


def check(args):
    import torch
    from backend import Backend
    from definition import Desc, gradients, reference

    backend, bad = Backend(args.library), 0
    gpu = backend.device == "cuda"  # else the tests' stand-in, to try this script without a GPU
    backend.wanted = "sm90a" if gpu else None
    for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float16, 1.4e-3)):
        for d in args.dims or (64, 128):
            for n, h, hk, desc in (
                (1, 1, 1, Desc()),
                (64, 2, 2, Desc(causal=True)),
                (130, 2, 1, Desc(causal=True)),
                (700, 4, 4, Desc()),
                (1000, 8, 2, Desc(causal=True)),
                (900, 2, 2, Desc(window=(100, 50))),
                (900, 2, 2, Desc(window=(-1, 70))),
                (2048, 3, 3, Desc(branches=[(512, 1), (1024, 2), (2048, 4)], causal=True)),
                (2048, 3, 3, Desc(branches=[(512, 1), (1024, 2), (2048, 4)])),
            ):
                case = Case(n, h, hk, d, desc, dtype, backend.device)
                out, lse, _, _ = reference(case.q, case.k, case.v, desc)
                case.lse.copy_(lse)
                out = out.to(dtype)
                backend.delta(backend.problem(case.q, case.k, desc), case.dout, out, None, case.delta)
                step, results = case.prepare(backend)
                problem = backend.problem(case.q, case.k, desc)
                for t in results:
                    backend.zero(problem, t)
                want, size = gradients(case.q, case.k, case.v, case.dout, None, desc)
                first = None
                for turn in range(args.again):
                    backend.run(step)
                    backend.synchronize()
                    if gpu and step.keep[2][:8].view(torch.int32)[1].item():
                        print(f"doubts d={d} n={n} {dtype} {desc.text()}")
                        bad += 1
                    if first is None:
                        first = [t.clone() for t in results]
                    elif not all(torch.equal(a, b) for a, b in zip(first, results)):
                        print(f"other bits d={d} n={n} {dtype} {desc.text()}")
                        bad += 1
                for name, got, right, m in zip(("dq", "dk", "dv"), first, want, size):
                    error = (got.double() - right).abs().max().item()
                    if not error <= bound * m:
                        print(f"wrong {name} d={d} n={n} {dtype} {desc.text()}: {error:.3g} > {bound * m:.3g}")
                        bad += 1
    for d in (args.dims or (64, 128)) if gpu else ():  # many tiles, many turns: the same bits, and near the general kernels
        case = Case(8192, 8, 8, d, Desc(causal=d % 128 == 0), torch.bfloat16)
        case.forward(backend_any := Backend(args.library))
        step, results = case.prepare(backend)
        backend_any.wanted = "sm80"
        general, right = case.prepare(backend_any)
        backend_any.run(general)
        first = None
        for turn in range(5):
            backend.run(step)
            torch.cuda.synchronize()
            if first is None:
                first = [t.clone() for t in results]
            elif not all(torch.equal(a, b) for a, b in zip(first, results)):
                print(f"other bits d={d} n=8192")
                bad += 1
        for name, got, want in zip(("dq", "dk", "dv"), first, right):
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not error < 5e-3:
                print(f"far from the general kernels: {name} d={d} {error:.3g}")
                bad += 1
    print(f"{os.path.basename(args.library)}: {'right' if bad == 0 else f'{bad} FAULTS'}", flush=True)
    return bad != 0


def time(args):
    import torch
    import torch.nn.functional as F
    from backend import Backend
    from definition import Desc
    from torch.nn.attention import SDPBackend, sdpa_kernel

    libraries = dict(pair.split("=", 1) for pair in args.libraries)
    backends = {name: Backend(path) for name, path in libraries.items()}
    cases = [(d, n, causal) for d in args.dims or (128, 64) for n in (8192, 16384) for causal in (True, False)]
    table = {name: [] for name in [*backends, "cuDNN"]}
    for d, n, causal in cases:
        h = max(1, 2048 // d)
        flops = 10 * d * h * (n * (n + 1) // 2 if causal else n * n)
        case = Case(n, h, h, d, Desc(causal=causal), torch.bfloat16)
        ways = {}
        for name, backend in backends.items():
            if not ways:
                case.forward(backend)
            ways[name] = lambda backend=backend, step=case.prepare(backend)[0]: backend.run(step)
        try:
            theirs = [t.transpose(1, 2).contiguous().requires_grad_() for t in (case.q, case.k, case.v)]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(*theirs, is_causal=causal)
            dout = case.dout.transpose(1, 2).contiguous()
            ways["cuDNN"] = lambda: torch.autograd.grad(out, theirs, dout, retain_graph=True)
        except RuntimeError:
            pass
        times = {name: [] for name in ways}
        for turn in range(args.repeat + 2):
            for name, way in ways.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(200_000)
                start.record()
                way()
                end.record()
                end.synchronize()
                if turn >= 2:
                    times[name].append(start.elapsed_time(end))
        for name, backend in backends.items():
            if backend.path != "sm90a":
                print(f"{name} ran {backend.path} at D={d}")
        for name in table:
            table[name].append(flops / statistics.median(times[name]) / 1e9 if name in times else float("nan"))
    titles = [f"{d}/{n // 1024}k{'c' if causal else 'f'}" for d, n, causal in cases]
    print(f"{'TFLOP/s (D/tokens, causal or full)':34s}" + "".join(f"{t:>10s}" for t in titles))
    for name, rates in table.items():
        print(f"{name:34s}" + "".join(f"{r:10.1f}" for r in rates), flush=True)


def clocks(args):
    """Cycles between one phase and the next, over blocks of the grid and turns after the first few."""
    import torch
    from backend import Backend
    from definition import Desc

    backend = Backend(args.library)
    backend.wanted = "sm90a"
    h = max(1, 2048 // args.dim)
    case = Case(args.tokens, h, h, args.dim, Desc(causal=args.causal), torch.bfloat16)
    case.forward(Backend(args.library))
    step, _ = case.prepare(backend)
    for _ in range(3):
        backend.run(step)
    size = BLOCKS * ROLES * TURNS * PHASES * 4
    step.keep[2][-size:].zero_()
    backend.run(step)
    torch.cuda.synchronize()
    print(f"{os.path.basename(args.library)} D={args.dim} n={args.tokens}{' causal' if args.causal else ''}: cycles")
    show_clocks(step.keep[2][-size:].view(torch.int32).reshape(BLOCKS, ROLES, TURNS, PHASES)[:, :, 16:128].tolist())


def show_clocks(stamps):
    """stamps: [block of the grid][role][turn][phase]. What happens between one stamp of a role and the next is named after the
    next; numbers are cycles."""
    for role, names in ((0, COMPUTES), (1, COMPUTES), (2, ADDS), (3, ADDS)):
        gaps, steps = {}, []
        for block in stamps:
            seen = [(x & 0xFFFFFFFF, phase, turn) for turn, row in enumerate(block[role]) for phase, x in enumerate(row) if x]
            if not seen:
                continue
            base = seen[0][0]
            seen.sort(key=lambda stamp: (stamp[0] - base + (1 << 31)) & 0xFFFFFFFF)
            for (a, _, _), (b, phase, _) in zip(seen, seen[1:]):
                if (b - a) & 0xFFFFFFFF < 1 << 20:
                    gaps.setdefault(phase, []).append((b - a) & 0xFFFFFFFF)
            ends = {turn: x for x, phase, turn in seen if phase == (9 if role < 2 else 1)}
            steps += [(ends[t + 1] - ends[t]) & 0xFFFFFFFF for t in ends if t + 1 in ends]
        if not steps:
            print(f"  role {role}: nothing was stamped")
            continue
        whole = sum(map(sum, gaps.values()))
        print(
            f"  {'warpgroup' if role < 2 else 'adder'} {role % 2}: a block of queries takes {statistics.median(steps):.0f}"
            f" (mean {statistics.mean(steps):.0f})"
        )
        for phase, name in enumerate(names):
            if phase in gaps:
                some = gaps[phase]
                print(
                    f"    {name:28s} median {statistics.median(some):7.0f}  mean {statistics.mean(some):8.1f}"
                    f"  a block {sum(some) / len(steps):7.0f}  share {100 * sum(some) / whole:5.1f} %"
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "time", "clocks"))
    parser.add_argument("libraries", nargs="+", metavar="LIBRARY")
    parser.add_argument("--dims", type=lambda text: tuple(map(int, text.split(","))), help="head dimensions, as 64,128")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--again", type=int, default=3, help="runs of each case whose bits are compared")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    args.library = args.libraries[0]
    return {"check": check, "time": time, "clocks": clocks}[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
