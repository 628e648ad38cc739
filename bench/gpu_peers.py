#!/usr/bin/env python3
"""ringattn's CUDA forward beside PyTorch's on one GPU: same process, same tensors, taking turns, CUDA events, medians.

    bench/gpu_peers.py --library build/libringattn_cuda.so [--cases dense,views,dilated,million,flex] [--out results/NAME]
    bench/gpu_peers.py --plot results/NAME.json

Peers get what suits them: contiguous [B, H, N, D] for dense attention; for dilated attention strided views of [B, N, H, D] into SDPA
and a copy of the result to its rows ("the careful way"), no_grad. Rates count attended pairs only, 4 D flops each."""

import argparse
import json
import os
import platform
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "gpu"))

BRANCHES = ((2048, 1), (4096, 2), (8192, 4))


def turns(ways, repeat, warm_up=2):
    """{name: median milliseconds} of functions that take turns."""
    import torch

    times = {name: [] for name in ways}
    for turn in range(repeat + warm_up):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            way()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


class Bench:
    def __init__(self, library, seconds):
        import torch
        from backend import Backend

        self.torch, self.backend, self.seconds, self.rows = torch, Backend(library), seconds, []

    def sdpa(self, kind, q, k, v, causal):
        """A function that runs PyTorch's attention with one backend, or None if it does not take these tensors."""
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kind = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}[kind]

        def run():
            with self.torch.no_grad(), sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        try:
            run()
            return run
        except RuntimeError:
            return None

    def ours(self, q, k, v, desc):
        """A function that runs this library into tensors of its own."""
        out = self.torch.empty(q.shape[0], q.stride(1) // q.shape[2] // q.shape[3] * q.shape[1], *q.shape[2:], device="cuda", dtype=q.dtype)
        out = out[:, ::out.shape[1] // q.shape[1]]  # rows like q's
        lse = self.torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda").transpose(1, 2)
        step = self.backend.prepare(q, k, v, desc, out, lse)

        def run():
            self.backend.run(step)

        run.out = out
        return run

    def repeats(self, flops):
        return max(3, min(30, int(self.seconds * 5e14 / flops / 3)))

    def add(self, group, case, flops, ways):
        ways = {name: way for name, way in ways.items() if way}
        times = turns(ways, self.repeats(flops))
        row = {"group": group, "case": case, "flops": flops, "path": self.backend.path, "ms": times,
               "tflops": {name: flops / t / 1e9 for name, t in times.items()}}
        self.rows.append(row)
        print(f"{group:8s} {case:44s} " + "  ".join(f"{name} {rate:6.1f}" for name, rate in row["tflops"].items()), flush=True)

    def tensors(self, n, h, d, count=3):
        return [self.torch.randn(1, n, h, d, device="cuda").to(self.torch.bfloat16) for _ in range(count)]

    # ------------------------------------------------------------------------------------------------------------ cases

    def dense(self):
        from backend import Desc

        for d, h in ((128, 16), (64, 32)):
            for n in (2048, 8192, 32768, 131072):
                for causal in (False, True):
                    q, k, v = self.tensors(n, h, d)
                    theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
                    pairs = n * (n + 1) // 2 if causal else n * n
                    self.add("dense", f"D={d} h={h} n={n}{' causal' if causal else ''}", 4 * d * h * pairs,
                             {"ringattn": self.ours(q, k, v, Desc(causal=causal)), "cuDNN": self.sdpa("cuDNN", *theirs, causal),
                              "FA2": self.sdpa("FA2", *theirs, causal)})

    def views(self):
        """The kernel alone on every r-th row, in segments; no copy back. Peers get [segments, h, rows, D] views of the same tensors."""
        from backend import Desc

        n, h = 131072, 12
        for d in (128, 64):
            for rows, r in ((2048, 1), (2048, 4), (1024, 1), (1024, 4), (512, 1), (512, 8)):
                for causal in (False, True):
                    q, k, v = (t[:, ::r] for t in self.tensors(n, h, d))
                    theirs = [t.view(n // r // rows, rows, h, d).transpose(1, 2) for t in (q, k, v)]
                    pairs = n // r // rows * (rows * (rows + 1) // 2 if causal else rows * rows)
                    desc = Desc(branches=((rows, 1),), causal=causal)
                    self.add("views", f"D={d} rows={rows} r={r}{' causal' if causal else ''}", 4 * d * h * pairs,
                             {"ringattn": self.ours(q, k, v, desc), "cuDNN": self.sdpa("cuDNN", *theirs, causal),
                              "FA2": self.sdpa("FA2", *theirs, causal)})

    def careful(self, kind, q, k, v, causal):
        """Dilated attention as a careful PyTorch user writes it: branch i on the i-th third of the heads, offset i mod r."""
        n, h, d = q.shape[1:]

        def cut(t, i):
            w, r = BRANCHES[i]
            return t.view(n // w, w, h, d)[:, i % r::r, h // 3 * i:h // 3 * (i + 1)].transpose(1, 2)

        parts = [self.sdpa(kind, cut(q, i), cut(k, i), cut(v, i), causal) for i in range(3)]
        if None in parts:
            return None

        def all_branches():
            out = self.torch.zeros_like(q)
            for i, run in enumerate(parts):
                cut(out, i).copy_(run())
            return out

        return all_branches

    def dilated(self):
        from backend import Desc

        for d in (128, 64):
            for n in (32768, 131072, 524288):
                for causal in (False, True):
                    q, k, v = self.tensors(n, 12, d)
                    flops = 0
                    for w, r in BRANCHES:
                        rows = w // r
                        flops += 4 * d * 4 * (n // w) * (rows * (rows + 1) // 2 if causal else rows * rows)
                    mine = self.ours(q, k, v, Desc(branches=BRANCHES, causal=causal))
                    theirs = self.careful("cuDNN", q, k, v, causal)
                    mine()
                    if theirs:
                        error = (mine.out.float() - theirs().float()).abs().max().item()
                        assert error < 0.05, f"results differ by {error}"
                    self.add("dilated", f"D={d} h=12 n={n}{' causal' if causal else ''}", flops,
                             {"ringattn": mine, "cuDNN": theirs, "FA2": self.careful("FA2", q, k, v, causal)})

    def million(self):
        """A million tokens, against as much work at 32768."""
        from backend import Desc

        def run(n, repeat):
            q, k, v = self.tensors(n, 16, 128)
            mine = self.ours(q, k, v, Desc(causal=True))
            return turns({"loop": lambda: [mine() for _ in range(repeat)]}, 1, 1)["loop"], 4 * 128 * 16 * (n * (n + 1) // 2)

        short, flops_short = run(32768, 1024)
        long, flops_long = run(1 << 20, 1)
        rates = {"ringattn": flops_long / long / 1e9, "ringattn at 32768": 1024 * flops_short / short / 1e9}
        self.rows.append({"group": "million", "case": "D=128 h=16 n=1048576 causal", "flops": flops_long, "path": self.backend.path,
                          "ms": {"ringattn": long, "ringattn at 32768": short}, "tflops": rates})
        print("million  " + "  ".join(f"{name} {rate:6.1f}" for name, rate in rates.items()), flush=True)

    def flex(self):
        """FlexAttention with the dilated pattern as a mask."""
        from backend import Desc
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        n, h, d = 32768, 12, 128
        q, k, v = self.tensors(n, h, d)
        theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        w = self.torch.tensor([w for w, _ in BRANCHES], device="cuda")
        r = self.torch.tensor([r for _, r in BRANCHES], device="cuda")
        o = self.torch.tensor([i % r for i, (_, r) in enumerate(BRANCHES)], device="cuda")

        def pairs(b, head, x, y):
            i = head // (h // 3)
            return (x // w[i] == y // w[i]) & (x % w[i] % r[i] == o[i]) & (y % w[i] % r[i] == o[i])

        mask = create_block_mask(pairs, None, h, n, n, device="cuda", _compile=True)
        flex = self.torch.compile(flex_attention)
        with self.torch.no_grad():
            flex(*theirs, block_mask=mask)

            def run():
                flex(*theirs, block_mask=mask)
        flops = sum(4 * d * 4 * (n // w) * (w // r) ** 2 for w, r in BRANCHES)
        self.add("flex", f"D={d} h={h} n={n} dilated", flops, {"ringattn": self.ours(q, k, v, Desc(branches=BRANCHES)), "Flex": run})


def table(rows):
    names = [name for name in ("ringattn", "ringattn at 32768", "cuDNN", "FA2", "Flex") if any(name in r["tflops"] for r in rows)]
    lines = ["| case | kernel | " + " | ".join(names) + " | against the best peer |", "| --- " * (len(names) + 3) + "|"]
    for r in rows:
        peers = [rate for name, rate in r["tflops"].items() if name != "ringattn"]
        ratio = f"{r['tflops']['ringattn'] / max(peers):.2f}x" if peers else "-"
        cells = [f"{r['tflops'][name]:.0f}" if name in r["tflops"] else "-" for name in names]
        lines.append(f"| {r['group']} {r['case']} | {r['path']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def plot(data, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in data["rows"] if r["group"] in ("dense", "dilated")]
    figure, axes = plt.subplots(2, 4, figsize=(16, 7), sharey=True)
    panels = [(g, d, c) for g in ("dense", "dilated") for d in (128, 64) for c in (False, True)]
    for axis, (group, d, causal) in zip(axes.flat, panels):
        part = [r for r in rows if r["group"] == group and f"D={d} " in r["case"] and ("causal" in r["case"]) == causal]
        for name in ("ringattn", "cuDNN", "FA2"):
            points = [(int(r["case"].split("n=")[1].split()[0]), r["tflops"][name]) for r in part if name in r["tflops"]]
            axis.plot(*zip(*points), marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{group} D={d}{' causal' if causal else ''}")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("TFLOP/s")
    axes[1, 0].set_ylabel("TFLOP/s")
    axes[0, 0].legend()
    figure.suptitle(f"forward, bf16, {data['machine']['gpu']}")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library")
    parser.add_argument("--cases", default="dense,views,dilated,million")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row and way, about")
    parser.add_argument("--out", help="writes NAME.json and NAME.md")
    parser.add_argument("--plot", help="draws a JSON file that --out wrote, as SVG beside it")
    args = parser.parse_args()
    if args.plot:
        with open(args.plot, encoding="utf-8") as file:
            plot(json.load(file), os.path.splitext(args.plot)[0] + ".svg")
        return
    if not args.library:
        parser.error("--library is needed")
    import torch

    bench = Bench(args.library, args.seconds)
    driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().strip()
    machine = {"gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda,
               "cudnn": torch.backends.cudnn.version(), "python": platform.python_version()}
    text = ", ".join(f"{name} {value}" for name, value in machine.items())
    for case in args.cases.split(","):
        getattr(bench, case)()
        if args.out:
            with open(args.out + ".json", "w", encoding="utf-8") as file:
                json.dump({"machine": machine, "rows": bench.rows}, file, indent=1)
            with open(args.out + ".md", "w", encoding="utf-8") as file:
                file.write(f"{text}\n\n{table(bench.rows)}\n")
    print(f"\n{text}\n\n{table(bench.rows)}")


if __name__ == "__main__":
    main()
