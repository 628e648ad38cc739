"""What is run by hand on a GPU works: gradients' bits, lost ranks and the bench of rings, in small."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from kit import DEVICE, draw, torch  # isort: skip
from definition import Desc, gradients, reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = pathlib.Path(os.environ.get("RINGATTN_LIBRARY", ""))
MPI = shutil.which("mpirun.openmpi") and (LIBRARY.parent / "ringattn_mpi_openmpi.so").exists()


class Scripts(unittest.TestCase):
    def run_script(self, name, *arguments, **variables):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **variables}
        command = [sys.executable, str(ROOT / name), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_gradients_have_the_same_bits_every_time(self):
        runs, ways = (100, 2) if DEVICE == "cuda" else (3, 1)
        text = self.run_script("tests/gpu/same_bits.py", "--runs", runs)
        shapes = text.count(f" {runs} runs, 0 differ") // ways
        self.assertGreaterEqual(shapes, 6)
        self.assertIn(f"{shapes * ways * runs} runs, 0 differ", text)

    @unittest.skipUnless(MPI, "needs Open MPI's mpirun, and the module for it beside the library")
    def test_survivors_name_the_lost_rank_and_compute_on(self):
        with tempfile.TemporaryDirectory() as modules:
            for module in (LIBRARY.parent / "ringattn_mpi_openmpi.so", pathlib.Path(os.environ["RINGATTN_CUDA_LIBRARY"])):
                (pathlib.Path(modules) / module.name).symlink_to(module.resolve())
            variables = {"RINGATTN_MODULE_PATH": modules}
            if DEVICE != "cuda":
                variables["RINGATTN_NCCL"] = os.environ["RINGATTN_CUDA_LIBRARY"]  # the stand-in plays both
            text = self.run_script("tests/gpu/faults.py", "--few", "--jobs", 1, "--rows", 64, **variables)
        self.assertRegex(text, "(3 of 3|4 of 4) jobs" if DEVICE == "cuda" else "4 of 4 jobs")

    def test_what_a_careful_user_writes_in_pytorch_is_the_same_dilated_attention(self):
        sys.path.insert(0, str(ROOT / "bench"))
        import dilated_ways

        branches, attend = ((16, 1), (32, 2), (64, 4)), torch.nn.functional.scaled_dot_product_attention
        q, k, v, dout = (draw(1, 128, 6, 16, torch.float64) for _ in range(4))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        desc = Desc(branches=branches)
        right, _, _, _ = reference(q.detach(), k.detach(), v.detach(), desc)
        slopes, _ = gradients(q.detach(), k.detach(), v.detach(), dout, None, desc)
        for way in (dilated_ways.sliced(attend, branches), dilated_ways.split(attend, branches)):
            found = way(*inputs)
            for mine, theirs in zip((found, *torch.autograd.grad(found, inputs, dout)), (right, *slopes)):
                self.assertLess((mine - theirs).abs().max().item(), 1e-9)

    def test_rings_are_measured_and_their_page_is_made(self):
        with tempfile.TemporaryDirectory() as directory:
            out = pathlib.Path(directory) / "rings"
            shape = "--seq", 256, "--heads", 1, "--head-dim", 64, "--ranks", "1,2", "--bucket", 64, "--turns", 1
            page = self.run_script("bench/gpu_rings.py", *shape, "--cases", "ring,slow", "--out", out)
            rows = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
        self.assertIn("| memory of a rank, as planned | 4 of 4 | 4 of 4 | yes |", page)
        self.assertEqual({row["group"] for row in rows}, {"ring", "memory", "error", "slow lane"})
        for row in rows:
            if row["group"] == "error":
                self.assertLess(max(row["rms"].values()), 2e-3)
            if row["group"] == "ring" and row["ranks"] > 1:
                self.assertEqual(row["bucket"], 64)
            if row["group"] == "ring" and (row["ranks"], row["pattern"]) == (2, "full"):
                self.assertEqual(row["bytes_sent"], 128 * 64 * 2 * (2 if row["pass"] == "forward" else 6))
                self.assertGreater(min(row["ms"], row["tflops"], row["host_us"]), 0)


if __name__ == "__main__":
    unittest.main()
