#!/usr/bin/env python3
"""ringattn on one GPU beside PyTorch and FlashAttention-4: same process, same tensors, taking turns, CUDA events, medians.

    bench/gpu_peers.py --library build/libringattn_cuda.so [--cases dense,views,...] [--out NAME]      (prints a page, writes NAME.json)
    bench/gpu_peers.py --library ... --cases backward,backward_views --fa4 DIRECTORY    (where FlashAttention-4 is installed)
    bench/gpu_peers.py --library ... --cases layer,dilated_backward,own_backward,dims,backward_dims [--fa4 DIRECTORY]

Cases through autograd (layer, dilated_backward, flex_layer) use the Python package: RINGATTN_LIBRARY and PYTHONPATH.

bench/report.py makes the page and the plot of the JSON.

Peers get what suits them: contiguous [B, H, N, D] for dense attention; for dilated attention strided views of [B, N, H, D] into
SDPA and a copy of the result to its rows ("the careful way"), no_grad. FlexAttention is compiled, with the pattern as its block
mask. Rates count attended pairs only, 4 D flops each, in the backward pass 10 D. Backward is timed alone: the peers' by
autograd.grad on a graph that is kept, this library's with delta and all kernels; "layer" is forward and backward together, in
PyTorch written in two careful ways (dilated_ways.py). A GPU at its power limit slows down, so only
rates of one row can be compared.
Times are the device's: it is kept busy until the host has enqueued the call."""

import argparse
import os
import platform
import sys
import time

import dilated_ways
import report
from backward_peers import Backward
from dilated_ways import BRANCHES
from flex_peers import Flex
from turns import HEAD_START, REFUSALS, say_left_out, turns

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "gpu"))


class Bench(Backward, Flex):
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

    def attend(self, kind, causal, grouped=False):
        """Attention of q, k and v as [B, H, N, D] by one of PyTorch's backends, or by FlashAttention-4. grouped: k and v have
        fewer heads."""
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if kind.startswith("FA4"):
            return lambda *x: self.fa4(*(t.transpose(1, 2) for t in x), causal, "fixed" in kind).transpose(1, 2)
        backend = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}[kind]

        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return run

    def fa4(self, q, k, v, causal, fixed=False):
        """[B, N, H, D]."""
        out = self.fa4_func(q, k, v, causal=causal, deterministic=fixed)
        return out[0] if isinstance(out, tuple) else out

    def kinds(self, fixed=False):
        """Names of the peers; fixed: also those whose gradients have a fixed order."""
        return ("cuDNN", "FA2") + (("FA4",) + (("FA4 fixed order",) if fixed else ()) if self.fa4_func else ())

    def forward(self, kind, q, k, v, causal, grouped=False):
        """A function that runs a peer's forward pass, or None if it does not take these tensors."""
        attend = self.attend(kind, causal, grouped)

        def run():
            with self.torch.no_grad():
                return attend(q, k, v)

        try:
            run()
            return run
        except REFUSALS as error:
            say_left_out(kind, error)
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

    def peers(self, tensors, causal):
        return {kind: self.forward(kind, *tensors, causal) for kind in self.kinds()}

    def repeats(self, flops):
        return max(3, min(30, int(self.seconds * 5e14 / flops / 3)))

    def add(self, group, case, flops, ways, head_start=HEAD_START):
        """flops: one number for all ways, or one for each."""
        ways = {name: way for name, way in ways.items() if way}
        work = flops if isinstance(flops, dict) else {name: flops for name in ways}
        times = turns(ways, self.repeats(max(work.values())), head_start=head_start)
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
                            **self.peers(theirs, causal),
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
                            **self.peers(theirs, causal),
                        },
                    )

    def careful(self, kind, q, k, v, causal):
        """A function that runs dilated attention in PyTorch, or None if the backend does not take these tensors."""
        way = dilated_ways.sliced(self.attend(kind, causal))

        def run():
            with self.torch.no_grad():
                return way(q, k, v)

        try:
            run()
            return run
        except REFUSALS as error:
            say_left_out(kind, error)
            return None

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
                        dilated_ways.flops(n, 12, d, causal, 4),
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
                    {"ringattn": dilated_ways.flops(n, 12, d, False, 4), "own dense": 4 * d * 12 * dense * dense},
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
                ways[kind] = self.forward(kind, *theirs, False, grouped=True)
                ways[kind + " packed"] = self.forward(kind, theirs[0].view(b, hk, h // hk * nq, d), *theirs[1:], False)
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

    def dims(self):
        """Head dimensions beside 64 and 128."""
        from definition import Desc

        n = 16384
        for d, h in ((96, 16), (192, 16), (256, 8)):
            for causal in (False, True):
                q, k, v = self.tensors(n, h, d)
                theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
                pairs = n * (n + 1) // 2 if causal else n * n
                ways = {"ringattn": self.ours(q, k, v, Desc(causal=causal)), **self.peers(theirs, causal)}
                self.add("dims", f"D={d} h={h} n={n}{' causal' if causal else ''}", 4 * d * h * pairs, ways)

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
    parser.add_argument("--fa4", metavar="DIRECTORY", help="where FlashAttention-4 is installed, to be compared with")
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
    report.measure(bench, args.cases.split(","), result, args.out, after=torch.cuda.empty_cache)


if __name__ == "__main__":
    main()
