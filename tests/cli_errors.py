"""What a new user gets wrong: each attempt ends with its exit code and one sentence, and leaves no output file."""
import io
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit

USAGE, FILE, MEMORY, NOT_AVAILABLE = 2, 3, 4, 6


class Refusals(kit.Case):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.array = rng.standard_normal((1, 12, 2, 4)).astype(np.float32)
        for name in ("q", "k", "v", "dout"):
            self.save(name + ".npy", self.array)
        self.before = self.files()

    def f(self, name):
        return self.path(name + ".npy")

    def bytes_of(self, name):
        with open(self.f(name), "rb") as f:
            return f.read()

    def run_refused(self, code, *more, says=(), q=None, k=None, v=None, out=None, **kwargs):
        """run with one thing wrong leaves the directory as it was."""
        before = self.files()
        names = [self.f(usual) if name is None else name for name, usual in ((q, "q"), (k, "k"), (v, "v"), (out, "out"))]
        self.refused(code, "run", "--q", names[0], "--k", names[1], "--v", names[2], "--out", names[3], *more, says=says,
                     **kwargs)
        self.assertEqual(self.files(), before)

    # ------------------------------------------------------------------------------------------------------------- usage

    def test_no_command_prints_the_commands(self):
        done = kit.run()
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("usage:", done.stderr)

    def test_unknown_names_are_refused_with_a_suggestion(self):
        self.refused(USAGE, "rum", says=["rum", "did you mean run"])
        self.run_refused(USAGE, "--segmnt-lengths", "4", says=["--segmnt-lengths", "did you mean --segment-lengths"])
        self.run_refused(USAGE, "--combine", "mixx", says=["--combine", "mixx", "heads|mix"])
        self.run_refused(USAGE, "--layout", "zig-zag", says="zigzag")
        self.run_refused(USAGE, "--offset", "rank", says="--offset")
        self.run_refused(USAGE, "--dtype", "float32", says="--dtype")
        self.run_refused(USAGE, "--kernel", "fast", says="--kernel")
        self.run_refused(USAGE, "--schedule", "rings", says="did you mean ring")
        self.run_refused(USAGE, "--frobnicate", says="--frobnicate")
        self.run_refused(USAGE, "extra", says="extra")
        self.run_refused(USAGE, "-x", says="-x")

    def test_options_of_other_commands_are_refused(self):
        self.run_refused(USAGE, "--seq", "12", says=["--seq", "shapes come from the files"])
        self.refused(USAGE, "plan", "--out", "x.npy", says="--out")
        self.refused(USAGE, "info", "--causal", says="--causal")

    def test_missing_options_and_values_are_named(self):
        self.refused(USAGE, "run", "--q", self.f("q"), "--k", self.f("k"), "--v", self.f("v"), says="--out")
        self.refused(USAGE, "grad", "--q", self.f("q"), "--k", self.f("k"), "--v", self.f("v"), "--dout", self.f("dout"),
                     says="--dq")
        self.refused(USAGE, "why", "--query", "3", says="--key")
        self.run_refused(USAGE, "--segment-lengths", says="--segment-lengths needs a value")
        self.run_refused(USAGE, "--causal=yes", says="--causal takes no value")

    def test_values_out_of_range_are_refused(self):
        for option, value in (("--dilation-rates", "0"), ("--dilation-rates", "-1"), ("--segment-lengths", "-4"),
                              ("--segment-lengths", "4,,8"),
                              ("--segment-lengths", "x"), ("--segment-lengths", ""),
                              ("--segment-lengths", "99999999999999999999"),
                              ("--ring-size", "0"), ("--ring-size", "2.5"), ("--ring-size", "x"), ("--bucket", "0"),
                              ("--threads", "0"),
                              ("--dropout", "1"), ("--dropout", "-0.1"), ("--dropout", "nan"), ("--scale", "inf"),
                              ("--scale", "one"),
                              ("--seed", "-1"), ("--window", "3"), ("--window", "-2,0"), ("--window", "1,2,3"),
                              ("--key-range", "5"),
                              ("--key-range", "9:3"), ("--key-range", "-1:3"), ("--timeout", "0"), ("--memory-limit", "0"),
                              ("--memory-limit", "10X"), ("--memory-limit", "99999999999999G")):
            with self.subTest(option=option, value=value):
                self.run_refused(USAGE, option, value, says=option)
        self.run_refused(USAGE, "--scale", "1e39", says="scale is 1e+39, beyond the range of float")
        self.refused(USAGE, "plan", "--head-dim", "257", says="--head-dim")
        self.refused(USAGE, "plan", "--seq", "1024,2048", says="--seq")
        self.refused(USAGE, "bench", "--rank", "4", "--ring-size", "4", says="--rank")
        self.refused(USAGE, "bench", "--rank", "1", "--ring-size", "4", "--query-placement", "replicated", says="--rank needs")
        self.refused(USAGE, "bench", "--repeat", "0", says="--repeat")

    def test_options_that_contradict_each_other_are_refused(self):
        self.run_refused(USAGE, "--segment-lengths", "4,8", "--dilation-rates", "1",
                         says=["--segment-lengths", "--dilation-rates"])
        self.run_refused(USAGE, "--segment-lengths", "4,8", says="--dilation-rates")
        self.run_refused(USAGE, "--transport", "self", "--ring-size", "2", says="--transport self")
        self.run_refused(USAGE, "--like", "longnet", "--combine", "heads", says="--like longnet")
        self.run_refused(USAGE, "--like", "dense", "--segment-lengths", "4", says="--like dense")
        self.run_refused(USAGE, "--schedule", "merge", says="replicated")
        self.refused(USAGE, "plan", "--heads", "3", "--kv-heads", "2", says="multiple")
        self.refused(USAGE, "plan", "--heads", "1", "--segment-lengths", "4,8", "--dilation-rates", "1,2", says="mix")
        self.refused(USAGE, "plan", "--fit", says="--memory-limit")
        self.refused(USAGE, "memory", "--ring-size", "2", "--ring-sizes", "1,2", says="--ring-sizes")
        self.refused(USAGE, "memory", "--transport", "self", "--ring-sizes", "1,2", says=["--transport self", "--ring-sizes"])
        for command in (["why", "--query", 1, "--key", 1], ["draw", "--seq", 9]):
            self.refused(USAGE, *command, "--batch", 0, says="--batch is 0")

    def test_transport_self_is_one_rank(self):
        rows = self.json("memory", "--transport", "self", "--seq", 64)["rows"]
        self.assertEqual([row["ring_size"] for row in rows], [1])
        cases = self.ok("verify", "--transport", "self", "--cases", 8).stdout
        self.assertEqual((cases.count(" ring "), cases.count(" ring 1 ")), (8, 8))

    def test_output_names_that_no_file_could_mend_are_refused(self):
        self.run_refused(USAGE, out=self.path("out.txt"), says=["--out", "out.txt"])
        self.run_refused(USAGE, out=self.path("out.safetensors"), says="names no tensor")
        self.run_refused(USAGE, "--lse", self.f("out"), says=["--out", "--lse"])
        self.run_refused(USAGE, "--lse", os.path.join(self.directory, ".", "out.npy"), says=["--out", "--lse"])
        self.run_refused(USAGE, out="", says="--out")

    def test_a_process_that_works_alone_says_its_mistake_whatever_rank_a_launcher_gave_it(self):
        jobs = {"openmpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpich": {"PMI_SIZE": "2", "PMI_RANK": "1"}}
        for job in jobs.values():
            self.run_refused(FILE, "--transport", "threads", q=self.f("none"), says="none.npy", env={**os.environ, **job})
            self.refused(USAGE, "plan", "--transport", "threads", "--bogus", says="--bogus", env={**os.environ, **job})
        self.refused(USAGE, "plan", "--bogus", says="--bogus", env={**os.environ, "PMI_RANK": "1"})  # there is no rank 0

    # ------------------------------------------------------------------------------------------------------------- files

    def test_missing_files_are_named(self):
        self.run_refused(FILE, q=self.f("none"), says=["none.npy", "No such file"])
        self.run_refused(FILE, q=self.directory, says="not a regular file")
        self.run_refused(FILE, out=self.path("none/out.npy"), says="none/out.npy")
        self.run_refused(FILE, k=self.path("none.safetensors:x"), says="none.safetensors")

    def test_too_many_ranks_for_one_process_name_the_option(self):
        self.refused(USAGE, "bench", "--seq", 64, "--ring-size", 600, says="--ring-size: ranks is 600")
        self.refused(USAGE, "memory", "--seq", 64, "--ring-sizes", "1,513", says="--ring-sizes: ranks is 513")

    def test_shapes_that_do_not_fit_are_shown(self):
        a = self.array
        for name, shape in (("flat", (12, 4)), ("five", (1, 1, 12, 2, 4)), ("batch", (2, 12, 2, 4)), ("dim", (1, 12, 2, 5)),
                            ("heads", (1, 12, 3, 4)), ("length", (1, 11, 2, 4)), ("none", (1, 12, 0, 4)),
                            ("thin", (1, 12, 2, 0)),
                            ("wide", (1, 12, 2, 257))):
            self.save(name + ".npy", np.zeros(shape, np.float32))
        self.run_refused(FILE, q=self.f("flat"), says=["[12, 4]", "[B, N, H, D]"])
        self.run_refused(FILE, q=self.f("five"), says="[B, N, H, D]")
        self.run_refused(FILE, q=self.f("batch"), says="batch")
        self.run_refused(FILE, q=self.f("dim"), says="last dimensions")
        self.run_refused(FILE, k=self.f("heads"), v=self.f("heads"), says="multiple")
        self.run_refused(FILE, k=self.f("length"), says=["[1, 11, 2, 4]", "k and v"])
        self.run_refused(FILE, q=self.f("none"), says="multiple")
        self.run_refused(FILE, q=self.f("thin"), k=self.f("thin"), v=self.f("thin"), says="head_dim")
        self.run_refused(FILE, q=self.f("wide"), k=self.f("wide"), v=self.f("wide"), says="head_dim")
        self.save("threed.npy", a[0])
        self.run_refused(FILE, q=self.f("threed"), says="batch dimension")
        self.save("f2.npy", a.astype(np.float16))
        self.run_refused(FILE, k=self.f("f2"), says="--dtype")
        self.refused(FILE, "grad", "--q", self.f("q"), "--k", self.f("k"), "--v", self.f("v"), "--dout", self.f("length"),
                     "--dq", self.f("dq"),
                     "--dk", self.f("dk"), "--dv", self.f("dv"), says="dout")

    def test_options_that_do_not_fit_the_file_are_refused(self):
        self.run_refused(FILE, "--segment-lengths", "4,8,12", "--dilation-rates", "1,2,3", says=["2 KV heads", "mix"])
        self.run_refused(FILE, "--key-range", "0:13", says=["--key-range", "12 keys"])

    def test_npy_files_that_are_not_ours_to_read_are_refused(self):
        good = self.bytes_of("q")

        def put(name, data):
            with open(self.path(name), "wb") as f:
                f.write(data)
            return self.path(name)

        def header(text, version=1, elements=b""):
            text = text.encode("latin1")
            length = struct.pack("<H" if version == 1 else "<I", len(text))
            return b"\x93NUMPY" + bytes([version, 0]) + length + text + elements

        shape = "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"
        self.save("fortran.npy", np.asfortranarray(self.array))
        self.save("int.npy", np.zeros((1, 12, 2, 4), np.int32))
        self.save("big.npy", self.array.astype(">f4"))
        self.save("complex.npy", self.array.astype(np.complex64))
        np.save(self.path("object.npy"), np.array([[[{}]]], dtype=object), allow_pickle=True)
        self.run_refused(FILE, q=self.f("fortran"), says="Fortran")
        self.run_refused(FILE, q=self.f("int"), says=["int.npy", "<i4"])
        self.run_refused(FILE, q=self.f("big"), says="big-endian")
        self.run_refused(FILE, q=self.f("complex"), says="<c8")
        self.run_refused(FILE, q=self.f("object"), says="pickled")
        self.run_refused(FILE, q=put("pickle.npy", pickle.dumps(self.array)), says="pickle")
        self.run_refused(FILE, q=put("empty.npy", b""), says="empty")
        self.run_refused(FILE, q=put("text.npy", b"hello, world"), says="not an .npy")
        self.run_refused(FILE, q=put("long.npy", good + b"x"), says="long.npy")
        self.run_refused(FILE, q=put("huge.npy", header(shape % ("<f4", "False", "(4611686018427387904, 2, 2, 2)"))),
                         says="2^63")
        self.run_refused(FILE, q=put("large.npy", header(shape % ("<f4", "False", "(1, 1000000000000, 2, 4)"))),
                         says="truncated")
        self.run_refused(FILE, q=put("code.npy", header("__import__('os').system('touch pwned')")), says="dictionary")
        self.run_refused(FILE, q=put("version.npy", header(shape % ("<f4", "False", "(1,)"), 4)), says="version")
        buffer = io.BytesIO()
        np.savez(buffer, q=self.array)
        self.run_refused(FILE, q=put("zip.npy", buffer.getvalue()), says="not an .npy")

    def test_an_npy_cut_at_any_byte_is_refused(self):
        data = self.bytes_of("q")
        cut = self.path("cut.npy")
        step = 1 if kit.LONG else 7
        for length in list(range(0, len(data), step)) + [len(data) - 1]:
            with open(cut, "wb") as f:
                f.write(data[:length])
            self.run_refused(FILE, q=cut, says="cut.npy")

    @unittest.skipUnless(os.getuid() == 0, "needs root to become somebody else")
    def test_files_without_permission_are_refused(self):
        os.chmod(self.directory, 0o755)
        # The build directory may lie where only root can go.
        somebody = {"user": 65534, "executable": shutil.copy(kit.RINGATTN, self.path("ringattn"))}
        secret = self.save("secret.npy", self.array)
        os.chmod(secret, 0o600)
        self.run_refused(FILE, q=secret, says=["secret.npy", "Permission denied"], **somebody)
        self.run_refused(FILE, out=self.f("out"), says=["out.npy", "Permission denied"], **somebody)
        locked = self.save("locked.npy", self.array)
        os.chmod(self.directory, 0o777)
        os.chmod(locked, 0o444)
        self.run_refused(FILE, out=locked, says=["locked.npy", "Permission denied"], **somebody)

    def test_a_full_disk_is_found_before_computing(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

        self.run_refused(FILE, says=["out.npy", "cannot be written"], preexec_fn=limit)

    @unittest.skipUnless(os.getuid() == 0, "needs root to mount a small file system")
    def test_a_full_file_system_is_found_and_left_empty(self):
        self.save("large.npy", np.zeros((1, 400, 8, 64), np.float32))
        small = self.path("small")
        os.mkdir(small)
        command = " ".join([f"mount -t tmpfs -o size=256k none {small} || exit 77;", kit.RINGATTN, "run", "--q",
                            self.f("large"), "--k",
                            self.f("large"), "--v", self.f("large"), "--out", f"{small}/out.npy; code=$?; ls -A", small,
                            "| wc -l; exit $code"])
        done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True)
        if done.returncode == 77 or "unshare" in done.stderr:
            self.skipTest("a tmpfs cannot be mounted here")
        self.assertEqual(done.returncode, FILE, done.stderr)
        self.assertIn("No space left", done.stderr)
        self.assertEqual(done.stdout.strip(), "0")

    def test_standard_output_that_is_full_is_an_error(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([kit.RINGATTN, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, FILE)
        self.assertIn("standard output", done.stderr)

    # ----------------------------------------------------------------------------------------------------- memory and rest

    def test_a_memory_limit_is_obeyed_before_anything_is_allocated(self):
        big = ["--seq", "100000000", "--heads", "32", "--head-dim", "128", "--memory-limit", "1G"]
        for command in (["bench"], ["bench", "--rank", "1", "--ring-size", "2"], ["verify"], ["memory"], ["plan"],
                        ["why", "--query", "5", "--key", "3"]):
            with self.subTest(command=command):
                start = time.monotonic()
                self.refused(MEMORY, *command, *big, says="--memory-limit")
                self.assertLess(time.monotonic() - start, 5)
        self.refused(MEMORY, "draw", "--memory-limit", "1K", says="--memory-limit")
        self.run_refused(MEMORY, "--dtype", "f64", "--memory-limit", "1K", says="--memory-limit")

    def test_random_cases_may_be_longer_than_32_bits_count(self):
        for seq in ("4294967296", "4294967295", "1000G"):
            self.refused(MEMORY, "verify", "--cases", 2, "--seq", seq, "--heads", 1, "--memory-limit", "1G", says="--memory-limit")

    def test_memory_of_a_long_ring_is_not_limited_by_that_of_one_rank(self):
        shape = ["memory", "--seq", "256", "--memory-limit", "700K"]
        self.ok(*shape, "--ring-sizes", "8")
        self.refused(MEMORY, *shape, "--ring-sizes", "8,1", says="--memory-limit")

    def test_numbers_may_be_written_short(self):
        for text, number in (("4K", 4096), ("1M", 1 << 20), ("1e6", 1000000), ("2E3", 2000), ("1G", 1 << 30), ("0e5", 0)):
            self.assertEqual(self.json("plan", "--seq", text)["seq"], number)
        self.assertEqual(self.json("plan", "--seq", "1M", "--window", "1K,0")["seq"], 1 << 20)
        for text in ("1e", "1.5M", "1KK", "K", "1e99", "1e20", "9999999G", "1M2", "-1e3"):
            self.refused(USAGE, "plan", "--seq", text, says="--seq")

    def test_a_picture_is_svg_by_its_name(self):
        self.refused(USAGE, "draw", "--svg", self.path("x.png"), says=".svg")
        self.assertEqual([f for f in self.files() if f.startswith("x.")], [])

    def test_what_this_build_lacks_is_said(self):
        self.refused(NOT_AVAILABLE, "plan", "--machine", "h200x8", "--dtype", "f64", says="no measured rate for f64")
        self.run_refused(NOT_AVAILABLE, "--transport", "nccl", says="nccl")
        self.run_refused(NOT_AVAILABLE, "--offload", says="--offload")
        missing = [k["name"] for k in self.json("info")["kernels"] if not k["available"]]
        for kernel in missing:
            self.run_refused(NOT_AVAILABLE, "--kernel", kernel, says=kernel)

    def test_an_old_output_survives_a_failure(self):
        self.save("out.npy", self.array)
        old = self.bytes_of("out")
        self.run_refused(FILE, k=self.f("none"))
        self.assertEqual(self.bytes_of("out"), old)


class Interrupted(kit.Case):
    def test_a_signal_leaves_no_partial_file(self):
        big = np.zeros((1, 60000, 1, 64), np.float32)
        for name in ("q", "k", "v"):
            self.save(name + ".npy", big)
        before = self.files()
        signals = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGXCPU: 152,
                   signal.SIGQUIT: -signal.SIGQUIT}

        def begin():
            for number in signals:
                signal.signal(number, signal.SIG_DFL)  # a shell's background job is begun with some of them ignored
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        for number, code in signals.items():
            with self.subTest(signal=number):
                process = subprocess.Popen([kit.RINGATTN, "run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v",
                                            self.path("v.npy"),
                                            "--out", self.path("out.npy"), "--kernel", "scalar", "--ring-size", "2"],
                                           stderr=subprocess.PIPE, preexec_fn=begin)
                deadline = time.monotonic() + 30
                while self.files() == before and time.monotonic() < deadline and process.poll() is None:
                    time.sleep(0.01)
                self.assertNotIn("out.npy", self.files())
                self.assertEqual(len(self.files()), len(before) + 1, "the temporary file is not there")
                time.sleep(0.2)
                process.send_signal(number)
                self.assertEqual(process.wait(60), code)
                process.stderr.close()
                self.assertEqual(self.files(), before)

    def test_an_input_that_shrinks_ends_the_run_with_a_sentence(self):
        big = np.zeros((1, 60000, 1, 64), np.float32)
        for name in ("q", "k", "v"):
            self.save(name + ".npy", big)
        before = self.files()
        process = subprocess.Popen([kit.RINGATTN, "run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v",
                                    self.path("v.npy"), "--out",
                                    self.path("out.npy"), "--kernel", "scalar"], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while self.files() == before and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        os.truncate(self.path("q.npy"), 4096)
        self.assertEqual(process.wait(60), FILE)
        self.assertIn("mapped file", process.stderr.read())
        process.stderr.close()
        self.assertEqual(self.files(), before)


if __name__ == "__main__":
    kit.main()
