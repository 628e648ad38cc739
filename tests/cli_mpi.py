"""Under mpirun the same command runs as one rank of p: the bits of threads, one voice, no output after a failure."""
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit
import safe

ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1"}
ROOT = os.environ.get("RA_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))


def found():
    """The MPIs for which there is a launcher and a module."""
    value = json.loads(kit.run("info", "--json").stdout)
    return [m["implementation"] for m in value["mpi"] if m["available"] and shutil.which("mpirun." + m["implementation"])]


def launch(mpi, ranks, *args, more=(), timeout=120, variables=None):
    return subprocess.run(["mpirun." + mpi, *more, "-n", str(ranks), kit.RINGATTN, *map(str, args)], capture_output=True,
                          text=True,
                          timeout=timeout, env={**ENVIRONMENT, **(variables or {})})


class UnderALauncher(kit.Case):
    def setUp(self):
        super().setUp()
        self.mpis = found()
        if not self.mpis:
            self.skipTest("there is no MPI launcher with a module")
        for name, array in zip(("q", "k", "v", "dout"), kit.random_arrays(np.random.default_rng(0), 2, 130, 150, 4, 2, 16)):
            self.save(name + ".npy", array)
        self.inputs = [part for n in ("q", "k", "v") for part in ("--" + n, self.path(n + ".npy"))]
        self.before = self.files()

    def test_ranks_as_processes_give_the_bits_of_ranks_as_threads(self):
        for mpi in self.mpis:
            for ranks, layout, schedule in ((2, "zigzag", "ring"), (3, "striped", "gather"), (4, "contiguous", "ring")):
                with self.subTest(mpi=mpi, ranks=ranks, layout=layout, schedule=schedule):
                    options = ["--causal", "--segment-lengths", "40,0", "--dilation-rates", "1,3", "--layout", layout,
                               "--schedule", schedule,
                               "--bucket", 8, "--dout", self.path("dout.npy")]
                    for where, names in (("m", launch), ("t", None)):
                        outputs = [part for n in ("dq", "dk", "dv") for part in ("--" + n,
                                                                                 self.path(f"{where}.safetensors:{n}"))]
                        outputs += ["--out", self.path(where + "out.npy"), "--lse", self.path(where + "lse.npy")]
                        done = (launch(mpi, ranks, "grad", *self.inputs, *options, *outputs) if names else
                                kit.run("grad", *self.inputs, *options, *outputs, "--ring-size", ranks, "--threads", 1))
                        self.assertEqual(done.returncode, 0, done.stderr)
                        self.assertEqual(done.stdout.count("grad ["), 1, done.stdout)
                    self.assertEqual(self.load("mout.npy").tobytes(), self.load("tout.npy").tobytes())
                    self.assertEqual(self.load("mlse.npy").tobytes(), self.load("tlse.npy").tobytes())
                    mine, theirs = safe.load(self.path("m.safetensors")), safe.load(self.path("t.safetensors"))
                    for name in ("dq", "dk", "dv"):
                        self.assertEqual(mine[name].tobytes(), theirs[name].tobytes(), name)
                    self.assertEqual(len(self.files()), len(self.before) + 6, self.files())

    def assert_ends(self, mpi, done, code):
        """A failing job ends with the ranks' code. On a busy machine MPICH's launcher kills a rank before it has ended, and may
        give that status in its place."""
        if mpi == "mpich":
            self.assertNotEqual(done.returncode, 0, done.stderr)
        else:
            self.assertEqual(done.returncode, code, done.stderr)

    def on_stand_in(self):
        """The environment of ranks on the stand-in for a GPU, with its NCCL."""
        build, modules = os.environ.get("RA_BUILD", "build"), self.path("modules")
        os.mkdir(modules)
        for module in glob.glob(os.path.join(build, "ringattn_mpi_*.so")) + [f"{build}/tests/stand_in/libringattn_cuda.so"]:
            os.symlink(os.path.abspath(module), os.path.join(modules, os.path.basename(module)))
        return {"RINGATTN_MODULE_PATH": modules, "RINGATTN_NCCL": os.path.join(modules, "libringattn_cuda.so")}

    def test_ranks_that_cannot_use_nccl_say_which_of_them_and_why(self):
        stand_in = {**self.on_stand_in(), "RINGATTN_LANE": "nccl"}
        for variables, reason in (({"RINGATTN_NCCL": ""}, "rank 0 says: no NCCL goes with this device"),
                                  ({"RINGATTN_NCCL": "/nowhere/libnccl.so.2"}, "rank 0 says: /nowhere/libnccl.so.2: cannot open"),
                                  ({"RINGATTN_STAND_IN_NCCL": "other:1"}, "rank 0 says: it has NCCL 2.28.3, and rank 1 has 2.28.2")):
            done = launch(self.mpis[0], 2, "verify", "--seq", 64, "--device", "cuda", variables={**stand_in, **variables})
            self.assertIn("RINGATTN_LANE asks for NCCL, and " + reason, done.stderr)
            self.assertNotEqual(done.returncode, 0)
        stand_in.update(RINGATTN_LANE="", RINGATTN_DEBUG="info")
        done = launch(self.mpis[0], 2, *"verify --seq 64 --device cuda --transport nccl".split(), variables=stand_in)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("rank 1: payload between processes goes by NCCL", done.stderr)

    def test_gpus_of_several_processes_give_the_bits_of_one_process(self):
        """On the stand-in for a GPU, by every lane: processes that copy from each other, use NCCL or stage over MPI, and
        threads."""
        variables = {**self.on_stand_in(), "RINGATTN_DEBUG": "info", "RINGATTN_STAND_IN_GPUS": "2"}
        options = ["--device", "cuda", "--causal", "--layout", "zigzag", "--schedule", "ring", "--bucket", 16,
                   "--dout", self.path("dout.npy")]
        lanes = (("", "goes by IPC"), ("nccl", "goes by NCCL 2.28.3"),
                 ("staged", "is staged in pinned memory, since rank 0 says: RINGATTN_LANE is staged"))
        for mpi in self.mpis:
            for lane, said in lanes:
                for where in ("m", "t"):
                    outputs = [part for n in ("dq", "dk", "dv", "out") for part in ("--" + n, self.path(f"{where}{n}.npy"))]
                    own, args = {**variables, "RINGATTN_LANE": lane}, ("grad", *self.inputs, *options, *outputs)
                    done = (launch(mpi, 3, *args, variables=own) if where == "m" else
                            kit.run(*args, "--ring-size", 3, env={**os.environ, **own}))
                    self.assertEqual(done.returncode, 0, done.stderr)
                    for rank in range(3):
                        self.assertIn(f"rank {rank} computes on GPU {rank % 2}\n", done.stderr)
                    if where == "m":
                        self.assertIn("rank 2: payload between processes " + said, done.stderr)
                for name in ("dq", "dk", "dv", "out"):
                    mine, theirs = self.load(f"m{name}.npy"), self.load(f"t{name}.npy")
                    self.assertEqual(mine.tobytes(), theirs.tobytes(), (mpi, lane, name))

    def test_verify_and_bench_run_and_one_rank_speaks(self):
        for mpi in self.mpis:
            verify = launch(mpi, 3, "verify", "--cases", 4, "--json")
            self.assertEqual(verify.returncode, 0, verify.stderr)
            self.assertEqual(json.loads(verify.stdout)["failed"], 0)
            bench = launch(mpi, 2, "bench", "--seq", 256, "--heads", 2, "--head-dim", 16, "--repeat", 2, "--pass", "both",
                           "--schedule", "ring", "--json")
            self.assertEqual(bench.returncode, 0, bench.stderr)
            value = json.loads(bench.stdout)
            self.assertEqual(value["ring_size"], 2)
            self.assertEqual(value["fwd"]["bytes_sent"], 2 * 128 * 2 * 16 * 4)
            self.assertEqual(value["fwd"]["bytes_sent_total"], 2 * value["fwd"]["bytes_sent"])
            self.assertEqual(value["peak_bytes"], value["planned_bytes"])
            plan = launch(mpi, 2, "plan", "--seq", 100, "--json")
            self.assertEqual(plan.returncode, 0, plan.stderr)
            self.assertEqual(json.loads(plan.stdout)["command"], "plan")

    def test_every_command_of_the_page_on_distributed_runs_starts(self):
        with open(os.path.join(ROOT, "docs", "distributed.md")) as f:
            blocks = re.findall(r"```sh\n(.*?)```", f.read(), re.S)
        lines = [line for block in blocks for line in block.splitlines()]
        self.assertGreater(len(lines), 4)
        for name, array in zip(("q", "k", "v"), kit.random_arrays(np.random.default_rng(0), 1, 200, 200, 4, 2, 16)):
            self.save(name + ".npy", array)
        for mpi in self.mpis:
            with open(self.path("hosts"), "w") as f:
                f.write("localhost slots=8\n" if mpi == "openmpi" else "localhost:8\n")
            for line in lines:
                with self.subTest(mpi=mpi, line=line):
                    line = line.replace("--seq 65536", "--seq 512")  # there is one machine here, and no Slurm
                    line = re.sub("^srun --mpi=pmix -n 16 ", "mpirun -n 4 ", line)
                    words = ["mpirun." + mpi if word == "mpirun" else kit.RINGATTN if word == "ringattn" else word
                             for word in line.split()]
                    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=ENVIRONMENT,
                                          cwd=self.directory)
                    self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_mistake_is_said_once_and_leaves_nothing(self):
        for mpi in self.mpis:
            done = launch(mpi, 3, "run", *self.inputs[:4], "--v", self.path("none.npy"), "--out", self.path("out.npy"))
            self.assertNotEqual(done.returncode, 0)
            self.assertEqual(done.stderr.count("none.npy cannot be read"), 1, done.stderr)
            done = launch(mpi, 2, "run", *self.inputs, "--out", self.path("out.npy"), "--ring-size", 3)
            self.assertIn("contradicts", done.stderr)
            done = launch(mpi, 2, "run", *self.inputs, "--out", self.path("none/out.npy"))
            self.assertIn("none/out.npy cannot be written", done.stderr)
            done = launch(mpi, 3, "run", *self.inputs, "--frobnicate")
            self.assertEqual(done.stderr.count("--frobnicate"), 1, done.stderr)
            self.assertEqual(self.files(), self.before)

    def test_a_trace_that_cannot_be_written_is_found_before_outputs_are(self):
        for mpi in self.mpis:
            with self.subTest(mpi=mpi):
                done = launch(mpi, 2, "run", *self.inputs, "--out", self.path("out.npy"), "--trace", self.path("none/x.json"))
                self.assert_ends(mpi, done, 3)
                self.assertEqual(done.stderr.count("x.json"), 1, done.stderr)
                self.assertEqual(self.files(), self.before)

    def test_ranks_that_ask_for_different_outputs_disagree_and_write_nothing(self):
        """Rows of a rank that does not write them would be zeros."""
        run = ["run", *self.inputs, "--out", self.path("out.npy")]
        lse, grad = ["--lse", self.path("lse.npy")], ["grad", *self.inputs, "--dout", self.path("dout.npy")]
        grad += [part for n in ("dq", "dk", "dv") for part in ("--" + n, self.path(n + "_.npy"))]
        one_file = ["run", *self.inputs, "--out", self.path("o.safetensors:out"), "--lse", self.path("o.safetensors:lse")]
        two_files = [*one_file[:-1], self.path("l.safetensors:lse")]
        cases = ((run + lse, run, "--lse is given on rank 0 and not on rank 1"),
                 (run, run + lse, "--lse is given on rank 1 and not on rank 0"),
                 (run, [*grad, *run[-2:]], "the command is run on rank 0 and grad on rank 1"),
                 (one_file, two_files, "--lse has another name in its file, or shares it with other outputs, on rank 1"),
                 (run, [*run[:-1], self.path("other.npy")], "--out is another file on rank 1 than on rank 0"))
        for mpi in self.mpis:
            for first, second, says in cases if mpi == self.mpis[0] else cases[:1]:
                done = self.launch_two(mpi, first, second)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("ranks disagree: " + says, done.stderr)
                self.assertEqual(self.files(), self.before)

    def test_ranks_that_would_make_other_calls_disagree_before_the_first(self):
        verify, bench, trace = ["verify", "--cases", 3], ["bench", "--seq", 64, "--repeat", 2], ["--trace", self.path("x.json")]
        cases = ((bench, [*bench[:-1], 3], "--repeat is 2 on rank 0 and 3 on rank 1"),
                 (bench, [*bench, "--pass", "both"], "--pass is 0 on rank 0 and 2 on rank 1"),
                 (verify, [*verify[:-1], 2], "--cases is 3 on rank 0 and 2 on rank 1"),
                 ([*verify, *trace], verify, "--trace is 1 on rank 0 and 0 on rank 1"),
                 (verify, bench, "the command is verify on rank 0 and bench on rank 1"))
        for mpi in self.mpis:
            for first, second, says in cases if mpi == self.mpis[0] else cases[:1]:
                done = self.launch_two(mpi, first, second)
                self.assert_ends(mpi, done, 5)
                self.assertIn("ranks disagree: " + says, done.stderr)
                self.assertEqual(self.files(), self.before)

    def test_a_mistake_of_another_rank_than_the_first_is_said_too(self):
        """The first rank, which speaks for all where all make it, waits for the others meanwhile."""
        run = ["run", *self.inputs, "--out", self.path("out.npy")]
        if "openmpi" not in self.mpis:
            self.skipTest("it needs a launcher that ends the job when one rank fails")
        done = self.launch_two("openmpi", run, [*run, "--bogus"])
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("ringattn: rank 1: run has no option --bogus", done.stderr)
        self.assertEqual(self.files(), self.before)

    def launch_two(self, mpi, first, second):
        """A command for each of two ranks."""
        first, second = ([kit.RINGATTN, *map(str, arguments)] for arguments in (first, second))
        return subprocess.run(["mpirun." + mpi, "-n", "1", *first, ":", "-n", "1", *second], capture_output=True, text=True,
                              timeout=120, env=ENVIRONMENT)

    def ranks_of(self, name):
        """The processes that run on this file: those that this test started."""
        found = subprocess.run(["pgrep", "-f", f"{kit.RINGATTN} run --q {name}"], capture_output=True, text=True).stdout.split()
        mine = []
        for pid in found:
            try:
                if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(kit.RINGATTN):
                    mine.append(int(pid))
            except OSError:  # it has ended meanwhile
                pass
        return mine

    def peaks_of(self, mpi, ranks, name, *args):
        """What each rank held at most beside mapped files, MPI's own memory included, and its VmHWM. Buffers live as long as
        the call they serve, so looking every few milliseconds does not miss them."""
        process = subprocess.Popen(["mpirun." + mpi, "-n", str(ranks), kit.RINGATTN, "run", "--q", name, *map(str, args)],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        pids, peaks = [], {}
        while process.poll() is None:
            if len(pids) < ranks:
                pids = self.ranks_of(name)
            for pid in pids:
                try:
                    with open(f"/proc/{pid}/status") as f:
                        fields = dict(line.split(":", 1) for line in f)
                    anon, shared, whole = (1024 * int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem", "VmHWM"))
                    peaks[pid] = tuple(map(max, peaks.get(pid, (0, 0)), (anon + shared, whole)))
                except (OSError, KeyError, ValueError):  # it has ended meanwhile
                    pass
            time.sleep(0.003)
        self.assertEqual(process.returncode, 0, process.stderr.read())
        process.stderr.close()
        self.assertEqual(len(peaks), ranks)
        return peaks.values()

    def test_files_three_times_the_memory_limit_finish_within_it(self):
        if kit.sanitized():
            self.skipTest("a sanitizer's shadow memory counts too")
        limit = 20 << 20
        shape = (1, 20480, 4, 64)  # 20 MiB each: q, k and v are three times the limit, and out comes on top
        arrays = {name: np.random.default_rng(i).standard_normal(shape, np.float32) for i, name in enumerate("qkv")}
        for name, array in arrays.items():
            self.save("big_" + name + ".npy", array)
        one_file = self.path("big.safetensors")
        safe.dump(one_file, {name: safe.tensor(array) for name, array in arrays.items()})
        options = ("--segment-lengths", "256,0", "--dilation-rates", "1,16", "--schedule", "ring", "--causal",
                   "--memory-limit", limit)
        formats = {"npy": [self.path(f"big_{name}.npy") for name in "qkv"] + [self.path("out.npy")],
                   "safetensors": [f"{one_file}:{name}" for name in "qkv"] + [self.path("out.safetensors:out")]}
        for mpi in self.mpis:
            for kind, (q, k, v, out) in formats.items():
                with self.subTest(mpi=mpi, kind=kind):
                    for held, whole in self.peaks_of(mpi, 4, q, "--k", k, "--v", v, "--out", out, *options):
                        self.assertLess(held, limit)
                        self.assertGreater(whole, held)  # the mapped rows
            self.assertEqual(self.load("out.npy").tobytes(), safe.load(self.path("out.safetensors"))["out"].tobytes())
        one = kit.run("run", "--q", formats["npy"][0], "--k", formats["npy"][1], "--v", formats["npy"][2], "--out",
                      self.path("one.npy"), *options, "--ring-size", 4, "--threads", 1)
        self.assertEqual(one.returncode, 0, one.stderr)
        self.assertEqual(self.load("one.npy").tobytes(), self.load("out.npy").tobytes())

    def test_rows_of_files_beyond_four_gibibytes_are_the_right_ones(self):
        rows, near = 9 << 22, 300  # 9 GiB each, all holes but for the last rows; two of four ranks begin beyond 4 GiB
        arrays = [np.random.default_rng(i).standard_normal((1, near, 1, 64), np.float32) for i in range(3)]
        for name, array in zip("qkv", arrays):
            self.save(f"near_{name}.npy", array)
            far = np.lib.format.open_memmap(self.path(f"far_{name}.npy"), "w+", np.float32, (1, rows, 1, 64))
            far[0, -near:] = array[0]
            del far
        for mpi in self.mpis:
            # Queries are few, and lie at the end: each meets keys of the last 150 rows only.
            far = ["--k", self.path("far_k.npy"), "--v", self.path("far_v.npy"), "--window", "149,0",
                   "--out", self.path("far_out.npy")]
            done = launch(mpi, 4, "run", "--q", self.path("near_q.npy"), *far, "--threads", 1)
            self.assertEqual(done.returncode, 0, done.stderr)
        near_inputs = [part for n in "qkv" for part in ("--" + n, self.path(f"near_{n}.npy"))]
        self.ok("run", *near_inputs, "--out", self.path("near_out.npy"), "--window", "149,0", "--threads", 1)
        np.testing.assert_allclose(self.load("far_out.npy")[0, 150:], self.load("near_out.npy")[0, 150:], rtol=0, atol=2e-6)

    def test_after_a_rank_is_killed_nothing_appears_under_the_outputs_name(self):
        big = np.zeros((1, 40000, 2, 64), np.float32)
        self.save("big.npy", big)
        name, before = self.path("big.npy"), None
        for mpi in self.mpis:
            before = self.files()
            process = subprocess.Popen(["mpirun." + mpi, "-n", "2", kit.RINGATTN, "run", "--q", name, "--k", name, "--v", name,
                                        "--out",
                                        self.path("out.npy"), "--kernel", "scalar", "--timeout", "2"],
                                       stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
            deadline = time.monotonic() + 60
            while self.files() == before and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.02)
            victims = []
            while len(victims) < 2 and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.2)
                victims = self.ranks_of(name)
            self.assertEqual(len(victims), 2, "both ranks run")
            os.kill(max(victims), signal.SIGKILL)
            process.communicate(timeout=60)
            self.assertNotEqual(process.returncode, 0)
            self.assertNotIn("out.npy", self.files())
            for left in set(self.files()) - set(before):  # mpirun's own kill cannot be cleaned up after
                self.assertTrue(left.startswith(".ringattn-"), left)
                os.unlink(self.path(left))


if __name__ == "__main__":
    kit.main()
