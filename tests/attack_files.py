"""What a call must not do to files: replace what it does not write, or write into what it reads, by whatever name."""
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit
import safe


class Files(kit.Case):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.arrays = {name: rng.standard_normal((16, 2, 8)).astype(np.float32) for name in ("q", "k", "v", "dout")}
        for name, array in self.arrays.items():
            self.save(name + ".npy", array)
        self.inputs = [word for name in ("q", "k", "v") for word in ("--" + name, self.path(name + ".npy"))]

    def bytes_of(self):
        return {name: pathlib.Path(self.path(name)).read_bytes() for name in self.files()}

    def untouched(self, code, *args, says):
        before = self.bytes_of()
        self.refused(code, *args, says=says)
        self.assertEqual(self.bytes_of(), before)

    def test_a_safetensors_file_with_tensors_of_others_is_not_replaced(self):
        safe.dump(self.path("m.safetensors"), {n: safe.tensor(self.arrays[n]) for n in ("q", "k")})
        target = self.path("m.safetensors")
        self.untouched(3, "run", *self.inputs, "--out", target + ":out", says=("--out", "m.safetensors", "'"))
        self.untouched(3, "run", *self.inputs, "--out", target + ":q", says=("--out", "'k'"))
        os.symlink("m.safetensors", self.path("link.safetensors"))
        self.untouched(3, "run", *self.inputs, "--out", self.path("link.safetensors:out"), says="--out")

    def test_a_safetensors_file_that_is_an_input_is_not_replaced(self):
        safe.dump(self.path("m.safetensors"), {n: safe.tensor(self.arrays[n]) for n in ("q", "k", "v")})
        inputs = [word for n in ("q", "k", "v") for word in ("--" + n, self.path("m.safetensors:" + n))]
        for name in ("out", "q"):
            self.untouched(3, "run", *inputs, "--out", self.path("m.safetensors:" + name), says=("--out", "--q"))

    def test_a_safetensors_file_of_this_call_s_own_tensors_is_replaced(self):
        target = self.path("o.safetensors")
        for _ in range(2):
            self.ok("run", *self.inputs, "--out", target + ":out", "--lse", target + ":lse")
        self.assertEqual(sorted(safe.load(target)), ["lse", "out"])
        self.untouched(3, "run", *self.inputs, "--out", target + ":out", says="'lse'")

    def test_no_output_is_an_input_or_another_output_by_whatever_name(self):
        out, link, hard = self.path("out.npy"), self.path("link.npy"), self.path("hard.npy")
        os.symlink("out.npy", link)  # dangling so far
        self.untouched_names(2, "--out", out, "--lse", link, says=("--out", "--lse"))
        self.save("out.npy", np.zeros(3))
        os.link(out, hard)
        self.untouched(2, "run", *self.inputs, "--out", out, "--lse", hard, says=("--out", "--lse"))
        self.untouched(2, "run", *self.inputs, "--out", out, "--trace", link, says=("--out", "--trace"))
        os.mkdir(self.path("d"))
        for name in ("q.npy", "./q.npy", "d/../q.npy"):
            self.untouched_names(2, "--out", self.directory + "/" + name, says=("--out", "--q"))
        os.link(self.path("k.npy"), self.path("k2.npy"))
        self.untouched_names(2, "--out", self.path("k2.npy"), says=("--out", "--k"))
        self.untouched_names(2, "--out", out, "--trace", self.path("v.npy"), says=("--trace", "--v"))

    def untouched_names(self, code, *args, says):
        before = self.files()
        self.refused(code, "run", *self.inputs, *args, says=says)
        self.assertEqual(self.files(), before)
        for name, array in self.arrays.items():
            np.testing.assert_array_equal(self.load(name + ".npy"), array)

    def test_a_gradient_is_none_of_the_inputs(self):
        f = self.path
        outputs = {"dq": f("dq.npy"), "dk": f("dk.npy"), "dv": f("dv.npy")}
        for name in outputs:
            words = [w for n, p in {**outputs, name: f("dout.npy")}.items() for w in ("--" + n, p)]
            self.untouched(2, "grad", *self.inputs, "--dout", f("dout.npy"), *words, says=("--" + name, "--dout"))

    def test_an_output_through_a_dangling_link_is_the_file_that_it_names(self):
        os.symlink("real.npy", self.path("link.npy"))
        self.ok("run", *self.inputs, "--out", self.path("link.npy"))
        self.assertTrue(os.path.islink(self.path("link.npy")))
        self.assertEqual(self.load("real.npy").shape, (16, 2, 8))

    def test_a_tensor_name_that_is_not_utf8_is_a_mistake_of_usage(self):
        bad = os.fsencode(self.path("o.safetensors:")) + b"\xff\xfe"
        done = subprocess.run([kit.RINGATTN, "run", *self.inputs, "--out", bad], capture_output=True, timeout=120)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(b"UTF-8", done.stderr)

    def test_a_path_that_is_not_utf8_is_written_and_reported(self):
        path = os.fsencode(self.directory) + b"/\xff.npy"
        done = subprocess.run([kit.RINGATTN, "run", *self.inputs, "--json", "--out", path], capture_output=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("out", json.loads(done.stdout)["files"])
        self.assertTrue(os.path.exists(path))

    def test_what_a_killed_run_left_is_removed_by_the_next(self):
        rng = np.random.default_rng(1)
        large = [self.save(f"large{n}.npy", rng.standard_normal((1, 16384, 4, 64)).astype(np.float32)) for n in "qkv"]
        words = ["--q", large[0], "--k", large[1], "--v", large[2], "--out", self.path("out.npy"), "--kernel", "scalar"]
        child = subprocess.Popen([kit.RINGATTN, "run", *words], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while not any(n.startswith(".ringattn-") for n in self.files()) and time.monotonic() < until:
            time.sleep(0.01)
        child.kill()
        child.wait()
        self.assertTrue(any(n.startswith(".ringattn-") for n in self.files()), self.files())
        self.assertNotIn("out.npy", self.files())
        self.ok("run", *self.inputs, "--out", self.path("out.npy"))
        self.assertFalse(any(n.startswith(".ringattn-") for n in self.files()), self.files())


if __name__ == "__main__":
    kit.main()
