"""The command line on a GPU: run, verify and bench with --device cuda, and which kernel they say ran.

RINGATTN names the program, RINGATTN_NCCL the libnccl.so.2, unless that is found where libraries are or comes with torch."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import nccl

PROGRAM = os.environ.get("RINGATTN", "build/ringattn")
LAUNCHED = dict(
    os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1"
)
RINGS = (
    ["--causal", "--layout", "zigzag", "--schedule", "ring", "--bucket", 64],
    ["--segment-lengths", "128,0", "--dilation-rates", "1,2", "--combine", "mix", "--schedule", "gather"],
    ["--query-placement", "replicated", "--window", "50,0"],
)
PATTERN = ["--segment-lengths", "128,256", "--dilation-rates", "1,2"]
NCCL = nccl.find()
APART = " ".join(f"{name}={value}" for name, value in nccl.apart("$OMPI_COMM_WORLD_RANK").items())
APART = ["sh", "-c", f'export {APART}; exec "$@"', "sh"]  # ranks by NCCL


def call(*args):
    return subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True, timeout=300, check=False)


def bench(seq, heads, *args):
    """A forward pass on the GPU."""
    shape = ("--seq", seq, "--heads", heads, "--head-dim", 64)
    return call("bench", *shape, "--pass", "fwd", "--device", "cuda", *args)


def gpu():
    """The kernel that runs bf16 on the GPU that the program sees; None: it sees none."""
    answer = bench(1024, 1, "--dtype", "bf16", "--repeat", 1, "--json")
    return json.loads(answer.stdout)["path"] if answer.returncode == 0 else None


class Cli(unittest.TestCase):
    def bench(self, *args):
        answer = bench(1024, 4, "--repeat", 3, "--json", *args)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        return json.loads(answer.stdout)

    def test_bench_names_the_kernel_that_ran(self):
        for dtype, kernel, path in (
            ("bf16", "auto", None),
            ("f16", "sm80", "sm80"),
            ("bf16", "sm80", "sm80"),
            ("f32", "cuda", "f32"),
        ):
            with self.subTest(dtype=dtype, kernel=kernel):
                found = self.bench("--dtype", dtype, "--kernel", kernel)
                self.assertEqual(found["kernel"], "cuda" if kernel == "auto" else kernel)
                self.assertIn(found["path"], (path,) if path else ("sm90a", "sm80"))
                self.assertGreater(found["fwd"]["gflops"], 0)

    @unittest.skipUnless(gpu() == "sm90a", "needs a Hopper GPU")
    def test_the_hopper_kernel_is_taken_by_name_or_says_why_not(self):
        self.assertEqual(self.bench("--dtype", "bf16", "--kernel", "sm90a")["path"], "sm90a")
        answer = bench(64, 1, "--dtype", "f32", "--kernel", "sm90a")
        self.assertEqual(answer.returncode, 6, answer.stderr)
        self.assertIn("bf16 and f16 only", answer.stderr)

    def test_verify_holds_every_dtype_and_kernel_to_its_bound(self):
        for dtype in ("bf16", "f16", "f32"):
            for kernel in ("cuda", "sm80"):
                for more in (
                    PATTERN,
                    [*PATTERN, "--causal"],
                    ["--causal", "--dropout", 0.2],
                    [*PATTERN, "--combine", "mix"],
                    ["--window", "50,0"],
                ):
                    with self.subTest(dtype=dtype, kernel=kernel, more=more):
                        answer = call(
                            "verify",
                            "--seq",
                            777,
                            "--heads",
                            4,
                            "--kv-heads",
                            2,
                            "--head-dim",
                            64,
                            "--dtype",
                            dtype,
                            "--kernel",
                            kernel,
                            "--device",
                            "cuda",
                            *more,
                        )
                        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)

    def verify_ring(self, *start, ring, dtype, more, lane=""):
        shape = ("--seq", 777, "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--dtype", dtype, "--device", "cuda")
        command = [*start, PROGRAM, "verify", *map(str, (*shape, *ring, *more))]
        environment = {**LAUNCHED, "RINGATTN_LANE": lane, "RINGATTN_NCCL": NCCL or "", "RINGATTN_DEBUG": "info"}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        self.assertEqual(answer.returncode, 0, (command, answer.stdout + answer.stderr))
        return answer.stderr

    def test_rings_of_one_process_hold_to_the_bounds_on_both_lanes(self):
        for dtype, ranks in (("bf16", 2), ("bf16", 3), ("f32", 4), ("f16", 8)):
            for more in RINGS:
                for lane in ((), ("--checksum",)):  # direct, staged
                    with self.subTest(dtype=dtype, ranks=ranks, more=more, lane=lane):
                        self.verify_ring(ring=("--ring-size", ranks), dtype=dtype, more=(*more, *lane))

    @unittest.skipUnless(shutil.which("mpirun"), "needs mpirun")
    def test_rings_of_processes_that_share_the_gpu_hold_to_the_bounds_on_both_lanes(self):
        for ranks, more in ((2, RINGS[0]), (3, RINGS[1]), (2, RINGS[2]), (4, RINGS[0])):
            for lane, said in (("", "goes by IPC"), ("staged", "is staged in pinned memory")):
                with self.subTest(ranks=ranks, more=more, lane=lane):
                    told = self.verify_ring("mpirun", "-n", str(ranks), ring=(), dtype="bf16", more=more, lane=lane)
                    self.assertIn("rank 1: payload between processes " + said, told)

    @unittest.skipUnless(shutil.which("mpirun.openmpi") and NCCL, "needs Open MPI's mpirun and NCCL")
    def test_rings_of_processes_by_nccl_hold_to_the_bounds(self):
        for ranks, dtype, more in ((2, "bf16", RINGS[0]), (4, "f16", RINGS[1]), (2, "f32", RINGS[2]), (4, "bf16", RINGS[0])):
            with self.subTest(ranks=ranks, dtype=dtype, more=more):
                start = ("mpirun.openmpi", "-n", str(ranks), *APART)
                told = self.verify_ring(*start, ring=(), dtype=dtype, more=more, lane="nccl")
                self.assertIn("rank 1: payload between processes goes by NCCL 2.", told)

    @unittest.skipUnless(shutil.which("mpirun.openmpi") and NCCL, "needs Open MPI's mpirun and NCCL")
    def test_ranks_of_one_host_that_share_a_gpu_are_refused_by_nccl_and_say_so(self):
        environment = {**LAUNCHED, "RINGATTN_LANE": "nccl", "RINGATTN_NCCL": NCCL, "NCCL_SOCKET_IFNAME": "lo"}
        command = ["mpirun.openmpi", "-n", "2", PROGRAM, *"verify --seq 64 --heads 1 --head-dim 64 --device cuda".split()]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        self.assertEqual(answer.returncode, 6, answer.stderr)
        self.assertIn("RINGATTN_LANE asks for NCCL, and rank 0 says: ", answer.stderr)

    @unittest.skipUnless(shutil.which("mpirun.openmpi"), "needs Open MPI's mpirun")
    def test_survivors_of_a_killed_process_name_it_and_end(self):
        self.kill_one_of_two()

    @unittest.skipUnless(shutil.which("mpirun.openmpi") and NCCL, "needs Open MPI's mpirun and NCCL")
    def test_survivors_of_a_killed_process_name_it_and_end_by_nccl_too(self):
        self.kill_one_of_two(*APART, RINGATTN_LANE="nccl", RINGATTN_NCCL=NCCL)

    def kill_one_of_two(self, *start, **variables):
        begin, seconds = time.monotonic(), 2.0
        options = "--seq 65536 --heads 16 --head-dim 128 --dtype bf16 --device cuda --schedule ring --repeat 100000".split()
        killed = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec timeout -s KILL {seconds + 15} "$@"; exec "$@"'
        command = ["mpirun.openmpi", "-n", "2", "--enable-recovery", *start, "sh", "-c", killed, "sh", PROGRAM, "bench"]
        command += [*options, "--timeout", str(seconds)]
        environment = {**LAUNCHED, **variables}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        self.assertRegex(answer.stderr, "ringattn: rank 1 (has been silent|is gone)")
        self.assertLess(time.monotonic() - begin, seconds + 15 + seconds + 1 + 10)  # ten more for the launcher

    def test_bench_times_both_passes(self):
        answer = call(*"bench --pass both --seq 1024 --heads 4 --head-dim 64 --dtype bf16 --device cuda --repeat 3 --json".split())
        self.assertEqual(answer.returncode, 0, answer.stderr)
        found = json.loads(answer.stdout)
        self.assertGreater(found["bwd"]["gflops"], 0)

    def test_ranks_played_alone_are_right_and_hold_what_was_planned(self):
        for rank, ranks, more in (
            (17, 64, ["--segment-lengths", "2048,4096,8192", "--dilation-rates", "1,2,4", "--dtype", "bf16", "--seq", 6400000]),
            (7, 8, ["--causal", "--layout", "zigzag", "--schedule", "ring", "--dtype", "f16", "--seq", 32768]),
            (2, 5, [*PATTERN, "--causal", "--batch", 2, "--dtype", "f32", "--seq", 7777]),
        ):
            with self.subTest(rank=rank, ranks=ranks, more=more):
                shape = ("--heads", 3, "--head-dim", 64, "--rank", rank, "--ring-size", ranks, "--device", "cuda", *more)
                answer = call("bench", *shape, "--pass", "both", "--repeat", 2, "--json")
                self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
                found = json.loads(answer.stdout)
                self.assertEqual(set(found["worst"]), {"out", "lse", "dq"})
                self.assertEqual(found["peak_bytes"], found["planned_bytes"])

    def test_run_writes_what_the_cpu_writes(self):
        import numpy as np

        rng = np.random.default_rng(1)
        with tempfile.TemporaryDirectory() as folder:
            names = {name: os.path.join(folder, name + ".npy") for name in ("q", "k", "v", "gpu", "cpu", "gpu_lse", "cpu_lse")}
            for name in ("q", "k", "v"):
                np.save(names[name], rng.standard_normal((1, 700, 4, 64), dtype=np.float32))
            for device in ("gpu", "cpu"):
                answer = call(
                    "run",
                    "--q",
                    names["q"],
                    "--k",
                    names["k"],
                    "--v",
                    names["v"],
                    "--out",
                    names[device],
                    "--lse",
                    names[device + "_lse"],
                    "--causal",
                    *PATTERN,
                    "--device",
                    "cuda" if device == "gpu" else "cpu",
                )
                self.assertEqual(answer.returncode, 0, answer.stderr)
            for suffix in ("", "_lse"):
                a, b = np.load(names["gpu" + suffix]), np.load(names["cpu" + suffix])
                self.assertTrue(np.array_equal(np.isinf(a), np.isinf(b)))
                finite = np.isfinite(a)
                self.assertLess(np.abs(a[finite] - b[finite]).max(), 2e-5)

    def test_what_a_gpu_cannot_do_is_refused_with_its_reason(self):
        answer = call("bench", "--seq", 64, "--heads", 1, "--head-dim", 64, "--device", "cuda", "--pass", "fwd", "--dtype", "f64")
        self.assertEqual(answer.returncode, 6, answer.stderr)
        self.assertIn("f32, bf16 and f16", answer.stderr)


if __name__ == "__main__":
    if gpu() is None:
        print("skipped: the program sees no usable GPU")
        sys.exit(77)
    unittest.main()
