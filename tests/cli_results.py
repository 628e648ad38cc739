"""The pages in bench/results are what bench/report.py makes of the JSON beside them; the benches describe themselves."""
import glob
import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit

ROOT = os.path.realpath(os.environ.get("RA_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")))
BENCH = os.path.join(ROOT, "bench")
sys.path.insert(0, BENCH)
import every_rank
import report


def pages():
    """What report.py says of itself: the JSON files and the page of each machine."""
    for line in re.findall(r"^ +bench/report\.py (bench/results/.*)$", report.__doc__, re.M):
        files, page = line.split(" -o ")
        names = [name for word in files.split() for name in sorted(glob.glob(os.path.join(ROOT, word)))]
        yield names, os.path.join(ROOT, page)


class Results(kit.Case):
    def test_every_page_is_what_its_json_says(self):
        seen = set()
        for files, page in pages():
            with self.subTest(page=page):
                results = [report.read(name) for name in files]
                picture = os.path.basename(page)[:-2] + "png"
                with open(page, encoding="utf-8") as file:
                    self.assertEqual(file.read(), report.page(results, picture if report.has_plot(results) else None))
                if report.has_plot(results):
                    self.assertTrue(os.path.exists(os.path.join(BENCH, "results", picture)))
                    seen.add(picture)
            seen |= {os.path.basename(name) for name in [*files, page]}
        with open(os.path.join(BENCH, "results", "h200-ranks.md"), encoding="utf-8") as file:
            self.assertEqual(file.read(), every_rank.table(report.read(os.path.join(BENCH, "results", "h200-ranks.json"))))
        seen |= {"h200-ranks.json", "h200-ranks.md"}
        self.assertEqual(seen, set(os.listdir(os.path.join(BENCH, "results"))))

    def test_a_goal_that_is_missed_is_said_to_be_missed(self):
        row = {"group": "backward", "case": "D=128 h=16 n=8192", "path": "sm90a", "tflops": {"ringattn": 87, "cuDNN": 100}}
        result = {"machine": {"gpu": "a GPU"}, "date": "2026-01-01", "rows": [row]}
        self.assertIn("| 0.88x | 0.87x | **no** |", report.page([result]))
        row["tflops"]["ringattn"] = 88
        self.assertIn("| 0.88x | 0.88x | yes |", report.page([result]))

    def test_a_goal_of_rings_that_is_missed_is_said_to_be_missed(self):
        case = {"pattern": "full", "n": 64, "heads": 1, "head_dim": 64, "dtype": "bf16"}
        ring = {**case, "group": "ring", "ms": 1.0, "tflops": 1.0, "bytes_sent": 0, "steps": 8, "bucket": 8192,
                "host_us": 51.0}
        rows = [{**ring, "ranks": 1, "pass": "forward", "against_one": 1.0},
                {**ring, "ranks": 8, "pass": "forward", "against_one": 0.94},
                {**ring, "ranks": 8, "pass": "forward", "against_one": 0.5, "bucket": 64},  # nobody's choice
                {**ring, "ranks": 8, "pass": "backward", "against_one": 0.91},
                {**case, "group": "memory", "ranks": 8, "planned_bytes": 1000 << 20, "measured_bytes": 1000 << 20,
                 "planned_total": 4000 << 20, "device_total": 4042 << 20, "granularity": 2 << 20}]
        rows += [{**case, "group": "error", "ranks": ranks, "rms": dict.fromkeys(("out", "dq", "dk", "dv"), error)}
                 for ranks, error in ((1, 1e-3), (8, 1.3e-3))]
        text = report.page([{"what": "rings", "machine": {"gpu": "a GPU"}, "date": "2026-01-01", "rows": rows}])
        for line in ("| 8 ranks against one, forward, full | 0.95x | 0.940x | **no** |",
                     "| 8 ranks against one, backward | 0.90x | 0.910x | yes |",
                     "| time of a rank's host, a step | 50 us at most | 51 us | **no** |",
                     "| memory of a rank, as planned | 1 of 1 | 1 of 1 | yes |",
                     "| memory of all ranks by the driver, within 1 % | 1 of 1 | 1 of 1 | yes |",
                     "| error of 8 ranks over that of one | 1.25x at most | 1.30x | **no** |"):
            self.assertIn(line, text)

    def test_several_runs_of_a_cpu_are_a_median_and_a_range(self):
        def run(ratio):
            row = dict(case="dense", dtype="bf16", seq=64, heads=1, dim=64, threads=1, direction="forward", unit="gflops")
            return {"machine": "a CPU", "date": "2026-01-01", "rows": [dict(row, ringattn=ratio, peer=1.0, ratio=ratio)]}

        text = report.page([run(2.5), run(1.5), run(2.0)])
        self.assertIn("| bf16 | 1 | 64 | 64 | 1 | 2.00x (1.50 - 2.50) |", text)
        self.assertIn("| bf16 forward, against PyTorch | 2.00x | 2.00x | yes |", text)

    def test_results_say_when_and_by_what_they_were_made(self):
        for files, _ in pages():
            for name in files:
                with open(name, encoding="utf-8") as file:
                    result = json.load(file)
                self.assertRegex(result["date"], r"^\d{4}-\d\d-\d\d$", name)
                self.assertTrue(os.path.exists(os.path.join(ROOT, result["made by"].split()[0])), name)

    def test_what_two_ranks_cost_becomes_a_page(self):
        program = self.path("ringattn")  # one rank takes 9 ms, two take 10
        with open(program, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\ncase $* in *--ring-size*) ms=10 ;; *) ms=9 ;; esac\n"
                       "echo '{\"fwd\": {\"ms\": '$ms', \"wait_ms\": 1}}'\n")
        os.chmod(program, 0o755)
        command = [sys.executable, os.path.join(BENCH, "transports.py"), program, "2", self.path("ranks.json")]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PATH": "/nowhere"})
        text = report.page([report.read(self.path("ranks.json"))])
        self.assertIn("| threads | dense | f32 | 2 | 32768 | 64 | 1 | 0.90x |", text)
        self.assertIn("| two ranks against one, threads | 0.93x | 0.90x | **no** |", text)

    def test_the_readme_quotes_what_was_measured(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            readme = file.read()

        def rows(name, group):
            rows = report.read(os.path.join(BENCH, "results", name + ".json"))["rows"]
            return [row for row in rows if row["group"] == group and "n=2048" not in row.get("case", "")]

        dense, dilated, backward = rows("h200", "dense"), rows("h200", "dilated"), rows("h200-backward", "backward")
        cpu = report.merged([report.read(os.path.join(BENCH, "results", "cpu.json"))])
        quoted = [(f"{report.span([report.against(row, 'cuDNN') for row in dense])} of cuDNN", "dense forward"),
                  (f"up to {max(row['tflops']['ringattn'] for row in dense):.0f} TFLOP/s", "dense forward"),
                  (f"{report.span([report.against(row) for row in dilated])} of the best", "dilated forward"),
                  (f"{report.span([report.against(row, 'cuDNN') for row in backward])} of cuDNN", "dense backward"),
                  (report.span([report.against(row, "FA4", "FA4 fixed order") for row in backward]) + " of FlashAttention-4",
                   "dense backward")]
        layer = rows("h200-layer", "layer")
        quoted.append((f"{report.span([report.against(row) for row in layer])} of the best way", "dilated attention through autograd"))
        one, several = ([row for row in rows("h200-few", "few") if f"queries={n} " in row["case"]] for n in (1, 16))
        quoted += [(f"{report.span([report.against(row) for row in one])} of cuDNN, the fastest of the others", "one query"),
                   (f"{report.span([report.against(row, 'FA2 packed') for row in several])} where that gets", "one query"),
                   (f"16 queries: {report.against(several[0], 'FA2'):.1f}x of FlashAttention-2", "one query")]

        def ring(**wanted):
            return report.span([row["against_one"] for row in rows("h200-rings", "ring")
                                if row["ranks"] > 1 and wanted.items() <= row.items()])

        full, causal = (" and ".join(ring(**{"pattern": pattern, "pass": which}) + f" {which}" for which in ("forward", "backward"))
                        for pattern in ("full", "causal"))
        quoted.append((f"full {full}; causal {causal} |", "2, 4, 8 ranks"))
        slow = report.span([row["ratio"] for row in rows("h200-rings-slow", "slow lane")])
        quoted.append((f"| the call takes {slow} as long |", "4 ranks whose messages"))
        played = report.read(os.path.join(BENCH, "results", "h200-ranks.json"))["ranks"]
        forward, backward = (sum(rank[which]["ms"] for rank in played) / 1e3 for which in ("fwd", "bwd"))
        quoted.append((f"{forward:.1f} s forward, {backward:.1f} s backward", "1,000,000,000 tokens"))
        for dtype, line in (("bf16", "bf16 on a CPU"), ("f32", "f32 on the same")):
            for direction in ("forward", "backward"):
                part = [row["value"] for row in cpu if report.peer(dtype, direction)(row)]
                quoted.append((report.span(part), line))
        mpi = [row["value"] for row in report.merged([report.read(os.path.join(BENCH, "results", "neoverse-n1.json"))])
               if report.ranks(threads=False)(row)]
        quoted.append((f"| {report.span(mpi)} |", "a ring of two MPI processes"))
        for text, begin in quoted:
            (line,) = [line for line in readme.splitlines() if line.startswith("| " + begin)]
            self.assertIn(text, line)

    def test_the_readme_quotes_the_memory_that_is_planned(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            (line,) = re.findall(r"^\| peak memory of a rank, .*$", file.read(), re.M)
        for dtype, pattern in (("f16", r"f16: (\d+) MiB on 1 rank; (\d+), (\d+), (\d+) MiB on 2, 4, 8"),
                               ("f32", r"f32: (\d+); (\d+), (\d+), (\d+)")):
            for ring_size, quoted in zip((1, 2, 4, 8), re.search(pattern, line).groups()):
                plan = self.json("plan", "--seq", 16384, "--heads", 8, "--head-dim", 64, "--schedule", "ring", "--dtype", dtype,
                                 "--ring-size", ring_size, "--kernel", "scalar", "--threads", 1)
                planned = max(rank["memory_bytes"] for rank in plan["ranks"]) / 2**20
                self.assertAlmostEqual(int(quoted), planned, delta=1, msg=(dtype, ring_size))  # kernels differ by less

    def test_the_benches_print_their_help_where_there_is_no_torch(self):
        run = (f"import runpy, sys; sys.modules['torch'] = None; sys.path[0] = {BENCH!r}; del sys.argv[0]; "
               "runpy.run_path(sys.argv[0], run_name='__main__')")
        for name in ("cpu_peers.py", "gpu_peers.py", "gpu_rings.py", "report.py"):
            done = subprocess.run([sys.executable, "-c", run, os.path.join(BENCH, name), "--help"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("bench/report.py", done.stdout)


if __name__ == "__main__":
    kit.main()
