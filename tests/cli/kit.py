"""What the tests of the command line share: running it, files in a fresh directory, one case against the reference."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np

import reference

RINGATTN = os.environ.get("RINGATTN", os.path.join(os.path.dirname(__file__), "..", "..", "build", "ringattn"))
LONG = os.environ.get("RINGATTN_LONG") == "1"

# The search for leaks when a sanitized program exits takes seconds on some machines: cli_leaks.py does it, once a command.
os.environ["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1:" + os.environ.get("ASAN_OPTIONS", "")


def sanitized():
    with open(RINGATTN, "rb") as f:
        return b"__asan_init" in f.read()


def run(*args, timeout=120, **kwargs):
    return subprocess.run([RINGATTN, *map(str, args)], capture_output=True, text=True, timeout=timeout, **kwargs)


class Case(unittest.TestCase):
    """A test in a directory of its own."""

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="ringattn-")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.directory, name)

    def save(self, name, array):
        np.save(self.path(name), array)
        return self.path(name)

    def load(self, name):
        return np.load(self.path(name))

    def files(self):
        return sorted(os.listdir(self.directory))

    def ok(self, *args, **kwargs):
        done = run(*args, **kwargs)
        self.assertEqual(done.returncode, 0, f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}")
        return done

    def json(self, *args, **kwargs):
        done = self.ok(*args, "--json", **kwargs)
        value = json.loads(done.stdout)
        self.assertEqual(value["schema"], 1)
        self.assertEqual(value["command"], args[0])
        return value

    def refused(self, code, *args, says=(), **kwargs):
        """The command fails with this code and one sentence on stderr."""
        done = run(*args, **kwargs)
        shown = f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}"
        self.assertEqual(done.returncode, code, shown)
        self.assertEqual(done.stdout, "", shown)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, shown)
        self.assertTrue(done.stderr.startswith("ringattn: "), shown)
        for word in [says] if isinstance(says, str) else says:
            self.assertIn(word, done.stderr, shown)
        return done


def arguments(p, dtype=None, ring=1, layout=None, bucket=None, threads=None, schedule=None, placement=None):
    """The options that describe a pattern and how to run it."""
    a = ["--segment-lengths", ",".join(map(str, p.segments)), "--dilation-rates", ",".join(map(str, p.rates)), "--combine",
         p.combine,
         "--offset", p.offset, "--dilate-queries", "yes" if p.dilate_queries else "no", "--ring-size", ring]
    if p.causal:
        a.append("--causal")
    if p.window is not None:
        a += ["--window", f"{p.window[0]},{p.window[1]}"]
    if p.key_range is not None:
        a += ["--key-range", f"{p.key_range[0]}:{p.key_range[1]}"]
    if p.scale is not None:
        a += ["--scale", repr(p.scale)]
    if p.dropout:
        a += ["--dropout", repr(p.dropout), "--seed", p.seed]
    for option, value in (("--dtype", dtype), ("--layout", layout), ("--bucket", bucket), ("--threads", threads),
                          ("--schedule", schedule), ("--query-placement", placement)):
        if value is not None:
            a += [option, value]
    return a


def check(test, p, q, k, v, dout, dtype="f32", **how):
    """run and grad of these arrays agree with the reference within the bounds."""
    for name, array in (("q", q), ("k", k), ("v", v), ("dout", dout)):
        test.save(name + ".npy", array)
    f = {n: test.path(n + ".npy") for n in ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv", "gout", "glse")}
    options = arguments(p, dtype=dtype, **how)
    test.ok("run", "--q", f["q"], "--k", f["k"], "--v", f["v"], "--out", f["out"], "--lse", f["lse"], *options)
    test.ok("grad", "--q", f["q"], "--k", f["k"], "--v", f["v"], "--dout", f["dout"], "--dq", f["dq"], "--dk", f["dk"], "--dv",
            f["dv"],
            "--out", f["gout"], "--lse", f["glse"], *options)
    want, m = reference.attention(p, *(reference.round_to(dtype, a) for a in (q, k, v, dout)))
    worst = {}
    for name in ("out", "lse", "dq", "dk", "dv"):
        got = test.load(name + ".npy")
        test.assertEqual(got.dtype, np.float64 if dtype == "f64" else np.float32)
        worst[name] = reference.error(name, got, want[name], m[name])
        test.assertLessEqual(worst[name], reference.bound(dtype, name, m),
                             f"{name}: {' '.join(map(str, options))} q {q.shape} k {k.shape}")
    test.assertEqual(test.load("out.npy").tobytes(), test.load("gout.npy").tobytes())
    test.assertEqual(test.load("lse.npy").tobytes(), test.load("glse.npy").tobytes())
    return worst


def random_arrays(rng, batch, nq, nk, hq, hk, dim):
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return make(batch, nq, hq, dim), make(batch, nk, hk, dim), make(batch, nk, hk, dim), make(batch, nq, hq, dim)


def main():
    if not os.access(RINGATTN, os.X_OK):
        sys.exit(f"{RINGATTN} is not there: build it, or set RINGATTN")
    unittest.main(verbosity=1)
