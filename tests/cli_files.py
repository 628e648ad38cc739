"""Files in every form: dtypes, three dimensions, .safetensors in and out, outputs that appear whole, large files."""
import json
import os
import pty
import resource
import subprocess
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit
import reference
import safe

try:
    import safetensors.numpy
except ImportError:
    safetensors = None


class Files(kit.Case):
    def setUp(self):
        super().setUp()
        self.q, self.k, self.v, self.dout = kit.random_arrays(np.random.default_rng(0), 2, 37, 41, 4, 2, 12)
        self.pattern = reference.Pattern([8, 0], [1, 3], combine="mix", causal=True)
        self.options = kit.arguments(self.pattern, ring=3)

    def close(self, got, name, dtype="f32"):
        want, m = reference.attention(self.pattern, *(reference.round_to(dtype, a) for a in (self.q, self.k, self.v,
                                                                                             self.dout)))
        self.assertLessEqual(reference.error(name, got, want[name], m[name]), reference.bound(dtype, name, m), name)

    def save_inputs(self, dtype=np.float32):
        for name in ("q", "k", "v", "dout"):
            self.save(name + ".npy", getattr(self, name).astype(dtype))

    def run_npy(self, *more):
        self.ok("run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out",
                self.path("out.npy"), "--lse",
                self.path("lse.npy"), *self.options, *more)

    def test_the_dtype_is_that_of_the_input_unless_one_is_named(self):
        for file_type, dtype in ((np.float32, "f32"), (np.float16, "f16"), (np.float64, "f64")):
            self.save_inputs(file_type)
            self.run_npy()
            self.close(self.load("out.npy"), "out", dtype)
            self.close(self.load("lse.npy"), "lse", dtype)
            self.assertEqual(self.load("out.npy").dtype, np.float64 if dtype == "f64" else np.float32)

    def test_inputs_are_converted_to_the_dtype_that_is_named(self):
        for file_type in (np.float16, np.float32, np.float64):
            for name in ("q", "k", "v", "dout"):
                setattr(self, name, getattr(self, name).astype(np.float16).astype(np.float32))
            self.save_inputs(file_type)
            for dtype in ("f32", "bf16", "f16", "f64"):
                for layout in ("contiguous", "zigzag", "striped"):
                    self.run_npy("--dtype", dtype, "--layout", layout)
                    self.close(self.load("out.npy"), "out", dtype)

    def test_files_of_different_types_need_a_dtype(self):
        self.save_inputs()
        self.save("k.npy", self.k.astype(np.float64))
        done = kit.run("run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out",
                       self.path("out.npy"))
        self.assertEqual(done.returncode, 3)
        self.run_npy("--dtype", "f32")
        self.close(self.load("out.npy"), "out")

    def test_three_dimensions_in_are_three_dimensions_out(self):
        for name in ("q", "k", "v", "dout"):
            setattr(self, name, getattr(self, name)[:1])
            self.save(name + ".npy", getattr(self, name)[0])
        self.run_npy()
        self.assertEqual(self.load("out.npy").shape, (37, 4, 12))
        self.assertEqual(self.load("lse.npy").shape, (4, 37))
        self.close(self.load("out.npy")[None], "out")
        self.close(self.load("lse.npy")[None], "lse")

    def test_only_the_outputs_that_were_asked_for_appear(self):
        self.save_inputs()
        before = self.files()
        self.ok("run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out",
                self.path("o.npy"), *self.options)
        self.assertEqual(self.files(), sorted(before + ["o.npy"]))
        self.close(self.load("o.npy"), "out")
        self.ok("grad", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--dout",
                self.path("dout.npy"), "--dq",
                self.path("dq.npy"), "--dk", self.path("dk.npy"), "--dv", self.path("dv.npy"), *self.options)
        self.assertEqual(self.files(), sorted(before + ["dk.npy", "dq.npy", "dv.npy", "o.npy"]))
        for name in ("dq", "dk", "dv"):
            self.close(self.load(name + ".npy"), name)

    def test_a_directory_that_cannot_be_synced_keeps_no_output_back(self):
        self.save_inputs()
        names = [word for n in ("q", "k", "v", "out", "lse") for word in ("--" + n, self.path(n + ".npy"))]

        def few_files():  # both outputs are open: there is no room for their directory
            resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))

        self.refused(3, "run", *names, "--threads", 1, preexec_fn=few_files, says="its directory cannot be synced")
        self.assertTrue({"out.npy", "lse.npy"} <= set(self.files()))
        self.assertFalse([name for name in self.files() if name.endswith(".tmp")])

    def test_an_output_has_the_mode_that_the_umask_leaves(self):
        self.save_inputs()
        old = os.umask(0o027)
        try:
            self.run_npy()
        finally:
            os.umask(old)
        self.assertEqual(os.stat(self.path("out.npy")).st_mode & 0o777, 0o640)

    # -------------------------------------------------------------------------------------------------------- safetensors

    def test_safetensors_in_and_several_tensors_out(self):
        for kind, dtype in (("F32", "f32"), ("BF16", "bf16"), ("F16", "f16"), ("F64", "f64")):
            for pad in range(3):  # elements at addresses that no type likes
                inputs, outputs = self.path(f"in{pad}.safetensors"), self.path("out.safetensors")
                safe.dump(inputs, {"other": safe.tensor(np.zeros(3), "U8"), **{n: safe.tensor(getattr(self, n),
                                                                                              kind) for n in ("q", "k", "v",
                                                                                                              "dout")}},
                          pad, {"format": "np"})
                names = [part for n in ("dq", "dk", "dv", "out", "lse") for part in ("--" + n, f"{outputs}:grad.{n}")]
                self.ok("grad", "--q", f"{inputs}:q", "--k", f"{inputs}:k", "--v", f"{inputs}:v", "--dout", f"{inputs}:dout",
                        *names, *self.options)
                got = safe.load(outputs)
                self.assertEqual(list(got), ["grad." + n for n in ("out", "lse", "dq", "dk", "dv")])
                for name in ("out", "lse", "dq", "dk", "dv"):
                    self.assertEqual(got["grad." + name].dtype, np.float64 if dtype == "f64" else np.float32)
                    self.close(got["grad." + name], name, dtype)

    def test_npy_and_safetensors_give_the_same_bits(self):
        self.save_inputs()
        self.run_npy()
        safe.dump(self.path("in.safetensors"), {n: safe.tensor(getattr(self, n)) for n in ("q", "k", "v")})
        self.ok("run", "--q", self.path("in.safetensors:q"), "--k", self.path("k.npy"), "--v", self.path("in.safetensors:v"),
                "--out",
                self.path("o.safetensors:x"), "--lse", self.path("lse2.npy"), *self.options)
        self.assertEqual(safe.load(self.path("o.safetensors"))["x"].tobytes(), self.load("out.npy").tobytes())
        self.assertEqual(self.load("lse2.npy").tobytes(), self.load("lse.npy").tobytes())

    @unittest.skipIf(safetensors is None, "the safetensors package is not installed")
    def test_the_safetensors_package_reads_what_we_write(self):
        self.save_inputs()
        out = self.path("o.safetensors")
        self.ok("run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out", out + ":out",
                "--lse", out + ":lse",
                *self.options)
        got = safetensors.numpy.load_file(out)
        self.close(got["out"], "out")
        self.close(got["lse"], "lse")

    @unittest.skipIf(safetensors is None, "the safetensors package is not installed")
    def test_we_read_what_the_safetensors_package_writes(self):
        path = self.path("in.safetensors")
        safetensors.numpy.save_file({n: getattr(self, n) for n in ("q", "k", "v")}, path, metadata={"a": "b"})
        self.ok("run", "--q", path + ":q", "--k", path + ":k", "--v", path + ":v", "--out", self.path("out.npy"), *self.options)
        self.close(self.load("out.npy"), "out")

    def test_a_safetensors_file_that_we_cannot_read_is_not_replaced(self):
        self.save_inputs()
        path = self.path("m.safetensors")
        good = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
        names = ["run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out", path + ":out"]
        text = json.dumps(good).encode()
        for what, header, body in (("a name with a zero", text.replace(b'"a"', b'"a\\u0000"'), b"1234"),
                                   ("spaces before the header", b"  " + text, b"1234"),
                                   ("the number -0", text.replace(b'"dtype"', b'"x": -0.0, "dtype"'), b"1234"),
                                   ("cut short", text, b"123"), ("a trailing byte", text, b"12345"),
                                   ("a new dtype", text.replace(b"U8", b"F8_NEW"), b"1234")):
            with self.subTest(what):
                safe.raw(path, header, body)
                with open(path, "rb") as f:
                    before = f.read()
                self.refused(3, *names, says=("--out", "m.safetensors", "exists and cannot be read", "not replaced"))
                with open(path, "rb") as f:
                    self.assertEqual(f.read(), before)
        for dtype in ("F8_E4M3FNUZ", "F8_E5M2FNUZ"):
            safe.raw(path, text.replace(b"U8", dtype.encode()), b"1234")
            self.refused(3, *names, says=("--out", "its tensor 'a'"))
        open(path, "w").close()  # nothing to lose
        self.ok(*names, *self.options)
        self.close(safe.load(path)["out"], "out")

    # ------------------------------------------------------------------------------------------------------ how it is run

    def test_auto_layout_balances_causal_work(self):
        self.save_inputs()
        files = ["run", "--q", self.path("k.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out",
                 self.path("out.npy"), "--ring-size", 4]
        self.assertEqual(self.json(*files, "--causal")["layout"], "zigzag")
        self.assertEqual(self.json(*files)["layout"], "contiguous")

    def test_like_sets_combine_and_offset(self):
        self.save_inputs()
        p = self.pattern
        for like, combine, offset in (("fkodom", "heads", "branch"), ("longnet", "mix", "head"),
                                      ("torchscale", "mix", "head-block"),
                                      ("strided", "heads", "residue")):
            self.pattern = reference.Pattern([8, 0], [1, 3], combine, offset, True, True)
            self.ok("run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out",
                    self.path("out.npy"), "--like", like,
                    "--segment-lengths", "8,0", "--dilation-rates", "1,3", "--causal")
            self.close(self.load("out.npy"), "out")
        self.pattern = reference.Pattern()
        self.ok("run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--out",
                self.path("out.npy"), "--like", "dense")
        self.close(self.load("out.npy"), "out")

    def test_mapped_files_do_not_count_against_the_memory_limit(self):
        n, heads, dim = 20000, 4, 64  # q, k, v: 20 MB each
        array = np.random.default_rng(1).standard_normal((1, n, heads, dim)).astype(np.float32)
        self.save("big.npy", array)
        big, limit = self.path("big.npy"), array.nbytes
        pid = os.posix_spawn(kit.RINGATTN, [kit.RINGATTN, "run", "--q", big, "--k", big, "--v", big, "--out",
                                            self.path("out.npy"), "--segment-lengths",
                                            "200", "--ring-size", "4", "--memory-limit", str(limit // 4)], os.environ)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        out = self.load("out.npy")
        p = reference.Pattern([200], [1])
        want, m = reference.attention(p, array[:, :200], array[:, :200], array[:, :200])
        self.assertLessEqual(reference.error("out", out[:, :200], want["out"], m["out"]), 2e-6)

    def test_the_estimate_of_a_progress_bar_needs_no_more_memory_than_the_call(self):
        if kit.sanitized():
            self.skipTest("sanitizers hold memory of their own, and take minutes")
        big = self.save("big.npy", np.random.default_rng(1).standard_normal((80, 3400, 1, 64), dtype=np.float32))

        def peak(stderr):  # of memory that is no mapped file
            command = [kit.RINGATTN, "run", "--q", big, "--k", big, "--v", big, "--out", self.path("out.npy"), "--memory-limit",
                       "3M", "--threads", "1", "--window", "1300,0"]
            process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL)
            most = 0
            while process.poll() is None:
                try:
                    with open(f"/proc/{process.pid}/status") as f:
                        most = max([most] + [1024 * int(line.split()[1]) for line in f if line.startswith("RssAnon")])
                except OSError:  # it has ended meanwhile
                    pass
            self.assertEqual(process.returncode, 0)
            return most

        ours, theirs = pty.openpty()
        try:
            self.assertLess(peak(theirs), peak(subprocess.DEVNULL) + (4 << 20))
        finally:
            os.close(ours)
            os.close(theirs)

    def test_lengths_of_zero_give_empty_outputs(self):
        for nq, nk in ((0, 0), (0, 5), (5, 0)):
            self.q, self.k, self.v, self.dout = kit.random_arrays(np.random.default_rng(2), 1, nq, nk, 2, 1, 3)
            self.save_inputs()
            self.run_npy()
            self.assertEqual(self.load("out.npy").shape, (1, nq, 2, 3))
            self.assertTrue((self.load("out.npy") == 0).all() and np.isneginf(self.load("lse.npy")).all())


if __name__ == "__main__":
    kit.main()
