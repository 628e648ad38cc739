#!/usr/bin/env python3
"""ringattn on one GPU beside PyTorch and FlashAttention-4: same process, same tensors, taking turns, CUDA events, medians.

    bench/gpu_peers.py --library build/libringattn_cuda.so [--cases dense,views,...] [--out NAME]      (prints a page, writes NAME.json)
    bench/gpu_peers.py --library ... --cases backward,backward_views --fa4 DIRECTORY    (where FlashAttention-4 is installed)

bench/report.py makes the page and the plot of the JSON.

Peers get what suits them: contiguous [B, H, N, D] for dense attention; for dilated attention strided views of [B, N, H, D] into
SDPA and a copy of the result to its rows ("the careful way"), no_grad. FlexAttention is compiled, with the pattern as its block
mask. Rates count attended pairs only, 4 D flops each, in the backward pass 10 D. Backward is timed alone: the peers' by
autograd.grad on a graph that is kept, this library's with delta and all kernels. A GPU at its power limit slows down, so only
rates of one row can be compared.
Times are the device's: it is kept busy until the host has enqueued the call."""

import argparse
import json
import os
import platform
import statistics
import sys
import time

import report

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "gpu"))

BRANCHES = ((2048, 1), (4096, 2), (8192, 4))
HEAD_START = 500_000  # cycles, about 0.3 ms


def turns(ways, repeat, warm_up=2):
    """{name: median milliseconds} of functions that take turns."""
    import torch

    times = {name: [] for name in ways}
    for turn in range(repeat + warm_up):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(HEAD_START)
            start.record()
            way()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


class Bench:
    def __init__(self, library, seconds, fa4=None):
        import torch
        from backend import Backend

        self.torch, self.backend, self.seconds, self.rows = torch, Backend(library), seconds, []
        self.fa4_func = None
        if fa4:
            import site

            site.addsitedir(fa4)
            from flash_attn.cute import flash_attn_func

            self.fa4_func = flash_attn_func

    def sdpa(self, kind, q, k, v, causal, grouped=False):
        """A function that runs PyTorch's attention with one backend, or None if it does not take these tensors.
        grouped: k and v have fewer heads."""
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kind = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}[kind]

        def run():
            with self.torch.no_grad(), sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        try:
            run()
            return run
        except RuntimeError:
            return None

    def ours(self, q, k, v, desc):
        """A function that runs this library into tensors of its own."""
        out = self.torch.empty(
            q.shape[0], q.stride(1) // q.shape[2] // q.shape[3] * q.shape[1], *q.shape[2:], device="cuda", dtype=q.dtype
        )
        out = out[:, :: out.shape[1] // q.shape[1]]  # rows like q's
        lse = self.torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda").transpose(1, 2)
        step = self.backend.prepare(q, k, v, desc, out, lse)

        def run():
            self.backend.run(step)

        run.out = out
        return run

    def repeats(self, flops):
        return max(3, min(30, int(self.seconds * 5e14 / flops / 3)))

    def add(self, group, case, flops, ways):
        """flops: one number for all ways, or one for each."""
        ways = {name: way for name, way in ways.items() if way}
        work = flops if isinstance(flops, dict) else {name: flops for name in ways}
        times = turns(ways, self.repeats(max(work.values())))
        row = {
            "group": group,
            "case": case,
            "flops": work["ringattn"],
            "path": self.backend.path,
            "ms": times,
            "tflops": {name: work[name] / t / 1e9 for name, t in times.items()},
        }
        self.rows.append(row)
        print(f"{group:8s} {case:44s} " + "  ".join(f"{name} {rate:6.1f}" for name, rate in row["tflops"].items()), flush=True)

    def tensors(self, n, h, d, count=3):
        return [self.torch.randn(1, n, h, d, device="cuda").to(self.torch.bfloat16) for _ in range(count)]

    # ------------------------------------------------------------------------------------------------------------ cases

    def dense(self):
        from definition import Desc

        for d, h in ((128, 16), (64, 32)):
            for n in (2048, 8192, 32768, 131072):
                for causal in (False, True):
                    q, k, v = self.tensors(n, h, d)
                    theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
                    pairs = n * (n + 1) // 2 if causal else n * n
                    self.add(
                        "dense",
                        f"D={d} h={h} n={n}{' causal' if causal else ''}",
                        4 * d * h * pairs,
                        {
                            "ringattn": self.ours(q, k, v, Desc(causal=causal)),
                            "cuDNN": self.sdpa("cuDNN", *theirs, causal),
                            "FA2": self.sdpa("FA2", *theirs, causal),
                        },
                    )

    def views(self):
        """The kernel alone on every r-th row, in segments; no copy back. Peers get [segments, h, rows, D] views of the same."""
        from definition import Desc

        n, h = 131072, 12
        for d in (128, 64):
            for rows, r in ((2048, 1), (2048, 4), (1024, 1), (1024, 4), (512, 1), (512, 8)):
                for causal in (False, True):
                    q, k, v = (t[:, ::r] for t in self.tensors(n, h, d))
                    theirs = [t.view(n // r // rows, rows, h, d).transpose(1, 2) for t in (q, k, v)]
                    pairs = n // r // rows * (rows * (rows + 1) // 2 if causal else rows * rows)
                    desc = Desc(branches=((rows, 1),), causal=causal)
                    self.add(
                        "views",
                        f"D={d} rows={rows} r={r}{' causal' if causal else ''}",
                        4 * d * h * pairs,
                        {
                            "ringattn": self.ours(q, k, v, desc),
                            "cuDNN": self.sdpa("cuDNN", *theirs, causal),
                            "FA2": self.sdpa("FA2", *theirs, causal),
                        },
                    )

    def careful(self, kind, q, k, v, causal):
        """Dilated attention as a careful PyTorch user writes it: branch i on the i-th third of the heads, offset i mod r."""
        n, h, d = q.shape[1:]

        def cut(t, i):
            w, r = BRANCHES[i]
            return t.view(n // w, w, h, d)[:, i % r :: r, h // 3 * i : h // 3 * (i + 1)].transpose(1, 2)

        parts = [self.sdpa(kind, cut(q, i), cut(k, i), cut(v, i), causal) for i in range(3)]
        if None in parts:
            return None

        def all_branches():
            out = self.torch.zeros_like(q)
            for i, run in enumerate(parts):
                cut(out, i).copy_(run())
            return out

        return all_branches

    @staticmethod
    def pattern_flops(n, d, causal):
        """Of the dilated pattern with 12 heads."""
        rows = [(n // w, w // r) for w, r in BRANCHES]
        return sum(4 * d * 4 * segments * (m * (m + 1) // 2 if causal else m * m) for segments, m in rows)

    def dilated(self):
        from definition import Desc

        for d in (128, 64):
            for n in (32768, 131072, 524288):
                for causal in (False, True):
                    q, k, v = self.tensors(n, 12, d)
                    mine = self.ours(q, k, v, Desc(branches=BRANCHES, causal=causal))
                    theirs = self.careful("cuDNN", q, k, v, causal)
                    mine()
                    if theirs:
                        error = (mine.out.float() - theirs().float()).abs().max().item()
                        assert error < 0.05, f"results differ by {error}"
                    self.add(
                        "dilated",
                        f"D={d} h=12 n={n}{' causal' if causal else ''}",
                        self.pattern_flops(n, d, causal),
                        {"ringattn": mine, "cuDNN": theirs, "FA2": self.careful("FA2", q, k, v, causal)},
                    )

    def own(self):
        """Dilated attention beside this library's own dense attention."""
        from definition import Desc

        for d in (128, 64):
            for n, dense in ((524288, 32768), (131072, 16384)):
                q, k, v = self.tensors(n, 12, d)
                self.add(
                    "own",
                    f"D={d} h=12 n={n} dilated, dense n={dense}",
                    {"ringattn": self.pattern_flops(n, d, False), "own dense": 4 * d * 12 * dense * dense},
                    {
                        "ringattn": self.ours(q, k, v, Desc(branches=BRANCHES)),
                        "own dense": self.ours(*self.tensors(dense, 12, d), Desc()),
                    },
                )

    def grouped(self):
        """Four KV heads for 32 query heads, against as many of both."""
        from definition import Desc

        n, h, d = 16384, 32, 128
        for rows in (n, 1024):
            for causal in (False, True):
                q, k, v = self.tensors(n, h, d)
                few = self.tensors(n, 4, d, 2)
                desc = Desc(branches=((rows, 1),), causal=causal)
                flops = 4 * d * h * (n // rows) * (rows * (rows + 1) // 2 if causal else rows * rows)
                self.add(
                    "grouped",
                    f"D={d} h={h}:4 n={n} rows={rows}{' causal' if causal else ''}",
                    flops,
                    {"ringattn": self.ours(q, *few, desc), "own h=32:32": self.ours(q, k, v, desc)},
                )

    def few(self):
        """Few queries against a long cache (decoding), 32 query heads on 8 KV heads, which lie in memory as rows of all heads
        or head by head. Peers get them head by head; "packed": queries of heads that share K and V as queries of one head."""
        from definition import Desc

        torch, h, hk, d = self.torch, 32, 8, 128
        for b, nq, n in ((1, 1, 131072), (1, 1, 1 << 20), (16, 1, 8192), (1, 16, 131072)):
            shapes = (nq, h), (n, hk), (n, hk)
            q, k, v = (torch.randn(b, rows, heads, d, device="cuda").to(torch.bfloat16) for rows, heads in shapes)
            theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
            ways = {}
            for kind in ("cuDNN", "FA2"):
                ways[kind] = self.sdpa(kind, *theirs, False, grouped=True)
                ways[kind + " packed"] = self.sdpa(kind, theirs[0].view(b, hk, h // hk * nq, d), *theirs[1:], False)
            for order, cache in (("[B, N, H, D]", (k, v)), ("[B, H, N, D]", [t.transpose(1, 2) for t in theirs[1:]])):
                mine = self.ours(q, *cache, Desc())
                mine()
                for way in filter(None, (ways["FA2"], ways["cuDNN"])):
                    error = (mine.out.float() - way().transpose(1, 2).float()).abs().max().item()
                    assert error < 0.01, f"results differ by {error}"
                case = f"D={d} h={h}:{hk} batch={b} queries={nq} keys={n} {order}"
                self.add("few", case, 4 * d * h * b * nq * n, {"ringattn": mine, **ways})
                rates = {name: 4 * b * n * hk * d / ms / 1e6 for name, ms in self.rows[-1]["ms"].items()}
                print("         GB/s  " + "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), flush=True)

    def million(self):
        """A million tokens, against a loop at 32768 that takes as long."""
        from definition import Desc

        def run(n, repeat, warm_up):
            q, k, v = self.tensors(n, 16, 128)
            mine = self.ours(q, k, v, Desc(causal=True))
            return turns({"loop": lambda: [mine() for _ in range(repeat)]}, 1, warm_up)["loop"], 4 * 128 * 16 * (
                n * (n + 1) // 2
            )

        long, flops_long = run(1 << 20, 1, 1)
        short, flops_short = run(32768, 1024, 0)
        rates = {"ringattn": flops_long / long / 1e9, "own loop at 32768": 1024 * flops_short / short / 1e9}
        self.rows.append(
            {
                "group": "million",
                "case": "D=128 h=16 n=1048576 causal",
                "flops": flops_long,
                "path": self.backend.path,
                "ms": {"ringattn": long, "own loop at 32768": short},
                "tflops": rates,
            }
        )
        print("million  " + "  ".join(f"{name} {rate:6.1f}" for name, rate in rates.items()), flush=True)

    def gradients(self, forward, inputs, dout):
        """A function that runs the backward pass of `forward` on inputs that need gradients, or None if there is none."""
        try:
            out = forward(*inputs)
            out = out[0] if isinstance(out, tuple) else out
            self.torch.autograd.grad(out, inputs, dout, retain_graph=True)
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"  left out: {str(error).splitlines()[0][:100]}", flush=True)
            return None
        return lambda: self.torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def backward_ways(self, q, k, v, dout, theirs, desc, causal):
        """q, k, v, dout: [1, N, H, D], perhaps every r-th row; theirs: the same four as SDPA takes them."""
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        torch = self.torch
        theirs = [t.detach().requires_grad_() for t in theirs]

        def sdpa(backend):
            def forward(*inputs):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*inputs, is_causal=causal)

            return forward

        out, lse = torch.empty_like(q), torch.empty(1, q.shape[2], q.shape[1], device="cuda").transpose(1, 2)
        delta, results = torch.empty_like(lse.transpose(1, 2)).transpose(1, 2), [torch.zeros_like(t) for t in (q, k, v)]
        self.backend.run(self.backend.prepare(q, k, v, desc, out, lse))
        problem = self.backend.problem(q, k, desc)
        step = self.backend.prepare_backward(q, k, v, desc, lse, dout, delta, results)

        def mine():
            self.backend.delta(problem, dout, out, None, delta)
            self.backend.run(step)

        ways = {"ringattn": mine}
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):
            ways[name] = self.gradients(sdpa(backend), theirs[:3], theirs[3].detach())
        if self.fa4_func:
            rows = [t.detach().transpose(1, 2).requires_grad_() for t in theirs]
            for name, fixed in (("FA4", False), ("FA4 fixed order", True)):
                ways[name] = self.gradients(
                    lambda *x, fixed=fixed: self.fa4_func(*x, causal=causal, deterministic=fixed), rows[:3], rows[3].detach()
                )
        mine()
        if ways["cuDNN"]:
            for found, right in zip(results, ways["cuDNN"]()):
                right = right.transpose(1, 2).reshape(found.shape)
                error = ((found.float() - right.float()).norm() / right.float().norm()).item()
                assert error < 0.02, f"gradients differ by {error}"
        return ways

    def backward(self):
        """The backward pass of dense attention."""
        from definition import Desc

        for d, h in ((128, 16), (64, 32)):
            for n in (2048, 8192, 32768):
                for causal in (False, True):
                    mine = self.tensors(n, h, d, 4)
                    theirs = [t.transpose(1, 2).contiguous() for t in mine]
                    pairs = n * (n + 1) // 2 if causal else n * n
                    ways = self.backward_ways(*mine, theirs, Desc(causal=causal), causal)
                    self.add("backward", f"D={d} h={h} n={n}{' causal' if causal else ''}", 10 * d * h * pairs, ways)

    def backward_views(self):
        """The backward pass on every r-th row, in segments."""
        from definition import Desc

        n, h = 131072, 12
        for d in (128, 64):
            for rows, r in ((2048, 1), (1024, 4), (512, 8)):
                for causal in (False, True):
                    mine = [t[:, ::r] for t in self.tensors(n, h, d, 4)]
                    theirs = [t.view(n // r // rows, rows, h, d).transpose(1, 2) for t in mine]
                    pairs = n // r // rows * (rows * (rows + 1) // 2 if causal else rows * rows)
                    ways = self.backward_ways(*mine, theirs, Desc(branches=((rows, 1),), causal=causal), causal)
                    case = f"D={d} rows={rows} r={r}{' causal' if causal else ''}"
                    self.add("backward views", case, 10 * d * h * pairs, ways)

    def flex(self):
        """FlexAttention, compiled, with each pattern as a block mask."""
        from definition import Desc
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = self.torch.compile(flex_attention)
        w, r, o = (self.torch.tensor(x, device="cuda") for x in zip(*((w, r, i % r) for i, (w, r) in enumerate(BRANCHES))))

        def lattice(b, head, x, y):
            i = head // 4
            return (x // w[i] == y // w[i]) & (x % w[i] % r[i] == o[i]) & (y % w[i] % r[i] == o[i])

        def before(b, head, x, y):
            return x >= y

        n, d, h = 32768, 128, 12
        q, k, v = self.tensors(n, h, d)
        theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        for name, desc, pairs, flops in (
            ("dense", Desc(), None, 4 * d * h * n * n),
            ("dense causal", Desc(causal=True), before, 4 * d * h * (n * (n + 1) // 2)),
            ("dilated", Desc(branches=BRANCHES), lattice, self.pattern_flops(n, d, False)),
        ):
            mask = create_block_mask(pairs, None, h, n, n, device="cuda", _compile=True) if pairs else None

            def run(mask=mask):
                with self.torch.no_grad():
                    return compiled(*theirs, block_mask=mask)

            mine = self.ours(q, k, v, desc)
            mine()
            error = (mine.out.float() - self.torch.nan_to_num(run().transpose(1, 2).float())).abs().max().item()
            assert error < 0.05, f"results differ by {error}"
            self.add("flex", f"{name} D={d} h={h} n={n}", flops, {"ringattn": mine, "Flex": run})


def triton_version():
    try:
        import triton

        return triton.__version__
    except ImportError:
        return "none"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--cases", default="dense,views,dilated,own,grouped,few,flex,million")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row and way, about")
    parser.add_argument("--fa4", metavar="DIRECTORY", help="where FlashAttention-4 is installed, to be compared with backward")
    parser.add_argument("--out", metavar="NAME", help="writes NAME.json")
    args = parser.parse_args()
    import torch

    bench = Bench(args.library, args.seconds, args.fa4)
    driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().strip()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton_version(),
        "python": platform.python_version(),
    }
    if args.fa4:
        import importlib.metadata

        machine["flash-attn-4"] = importlib.metadata.version("flash-attn-4")
    made_by = " ".join(["bench/gpu_peers.py", *sys.argv[1:]])
    result = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "made by": made_by, "rows": bench.rows}
    for case in args.cases.split(","):
        getattr(bench, case)()
        torch.cuda.empty_cache()
        if args.out:
            with open(args.out + ".json", "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
    print("\n" + report.page([result]))


if __name__ == "__main__":
    main()
