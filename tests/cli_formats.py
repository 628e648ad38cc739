"""Against NumPy and the safetensors package: what they refuse we refuse, and what we write they read."""
import io
import os
import random
import sys
import unittest
import warnings

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import corpus
import kit

try:
    import safetensors
    import safetensors.numpy
except ImportError:
    safetensors = None

MUTATIONS = 4000 if kit.LONG else 250
# Pieces that parsers of Python literals and of JSON read differently from those written by hand.
NPY_PIECES = [b"0", b"00", b"01", b"-0", b"+1", b"1_0", b"0x4", b"4L", b"4l", b"4.", b"1e1", b"True", b"()", b"(1)", b",", b" ",
              b"\n", b"\t", b"\r", b"\x0c", b"\x0b", b"\0", b"#", b"\\", b"'", b'"', b"u", b"b", b"r", b"{", b"}",
              b"\xff", b"\xc3\xa9", b"\n  "]
JSON_PIECES = [b"-0", b"00", b"1.0", b"1e1", b"1E0", b"null", b"true", b"NaN", b"[]", b"{}", b",", b":", b" ", b"\t", b"\x0c",
               b"\0", b"\\u0000", b"\\ud800", b"\\u0071", b"\\", b'"', b"\xff", b"\xc3\xa9", b"\xef\xbb\xbf", b"/**/",
               b"18446744073709551616", b'"x":' + b"[" * 126 + b"]" * 126 + b",", b'"x":' + b"[" * 127 + b"]" * 127 + b","]


def mutations(data, begin, end, pieces, rng):
    """The same file with one or two places of data[begin:end] changed."""
    for _ in range(MUTATIONS):
        text = bytearray(data)
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(begin, min(end, len(text)))
            kind = rng.randrange(4)
            if kind == 0:
                text[at:at + 1] = rng.choice(pieces)
            elif kind == 1:
                text[at:at] = rng.choice(pieces)
            elif kind == 2:
                del text[at:at + rng.randint(1, 3)]
            else:
                text[at] = rng.randrange(256)
        yield bytes(text)


class Formats(kit.Case):
    def setUp(self):
        super().setUp()
        self.save("k.npy", np.frombuffer(corpus.BODY, np.float32).reshape(1, 4, 1, 2))

    def attention(self, name):
        return ["run", "--q", name, "--k", self.path("k.npy"), "--v", self.path("k.npy"), "--out", self.path("out.npy")]

    def judge(self, name, data, theirs, suffix=""):
        """theirs: the array as the package reads the file, or None where it refuses it. True if we take it, too."""
        path = self.path(name)
        with open(path, "wb") as f:
            f.write(data)
        done = kit.run(*self.attention(path + suffix))
        self.assertIn(done.returncode, (0, 3), f"{done.stderr}{data!r}")
        if done.returncode == 0:
            self.assertIsNotNone(theirs, f"the package refuses {data!r}")
            ours = self.load("out.npy").tobytes()
            self.ok(*self.attention(self.save("theirs.npy", theirs)))
            self.assertEqual(ours, self.load("out.npy").tobytes(), data)
        return done.returncode == 0

    @staticmethod
    def numpy_reads(data):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                array = np.load(io.BytesIO(data), allow_pickle=False)
                return array if isinstance(array, np.ndarray) else None
        except Exception:  # it has one for every kind of damage
            return None

    @staticmethod
    def safetensors_reads(data):
        try:
            return safetensors.numpy.load(data)["q"]
        except Exception:
            return None

    def test_what_numpy_refuses_we_refuse(self):
        both = sum(self.judge("x.npy", data, self.numpy_reads(data)) for _, data, _ in corpus.npy_files())
        self.assertGreaterEqual(both, 5)
        rng, taken = random.Random(1), 0
        versions = [corpus.npy(corpus.entry() + "   \n", version=(v, 0)) for v in (1, 2, 3)]
        for data in versions:
            start = 10 if data[6] == 1 else 12
            for changed in mutations(data, 6, len(data) - len(corpus.BODY), NPY_PIECES, rng):
                if rng.random() < 0.7:  # a length that fits, else hardly a header would be looked at
                    length = len(changed) - start - len(corpus.BODY)
                    changed = changed[:8] + max(0, length).to_bytes(start - 8, "little") + changed[start:]
                taken += self.judge("x.npy", changed, self.numpy_reads(changed))
        self.assertGreater(taken, MUTATIONS // 100)  # harmless changes, such as spaces

    @unittest.skipIf(safetensors is None, "the safetensors package is not installed")
    def test_what_the_safetensors_package_refuses_we_refuse(self):
        both = 0
        for _, data, _ in corpus.safetensors_files():
            both += self.judge("x.safetensors", data, self.safetensors_reads(data), ":q")
        self.assertGreaterEqual(both, 4)
        rng, taken = random.Random(2), 0
        q = b'"q": {"dtype": "F32", "shape": [1, 4, 1, 2], "data_offsets": [0, 32]}'
        other = b'"e": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]}'
        for header in (b"{" + q + b"}   ", b'{"__metadata__": {"a": "b"}, ' + q + b", " + other + b"}"):
            data = corpus.safetensors(header)
            for changed in mutations(data, 8, 8 + len(header), JSON_PIECES, rng):
                if rng.random() < 0.8:
                    changed = (len(changed) - 8 - len(corpus.BODY)).to_bytes(8, "little") + changed[8:]
                taken += self.judge("x.safetensors", changed, self.safetensors_reads(changed), ":q")
        self.assertGreater(taken, MUTATIONS // 100)

    def test_numpy_reads_what_we_write_and_we_read_what_it_writes(self):
        rng = np.random.default_rng(3)
        for dtype in ("<f2", "<f4", "<f8"):
            for version in ((1, 0), (2, 0), (3, 0)):
                a = rng.standard_normal((2, 9, 3, 5)).astype(dtype)
                with open(self.path("a.npy"), "wb") as f, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    np.lib.format.write_array(f, a, version=version)
                # one key, its own: out is v
                self.ok("run", "--q", self.path("a.npy"), "--k", self.path("a.npy"), "--v", self.path("a.npy"), "--out",
                        self.path("out.npy"), "--lse", self.path("lse.npy"), "--window", "0,0")
                out = np.load(self.path("out.npy"), allow_pickle=False)
                self.assertEqual((out.dtype, out.shape), (np.float64 if dtype == "<f8" else np.float32, a.shape))
                self.assertTrue(np.allclose(out, a, rtol=1e-3 if dtype == "<f2" else 1e-6))
                self.assertEqual(np.load(self.path("lse.npy")).shape, (2, 3, 9))
                with open(self.path("out.npy"), "rb") as f:  # byte for byte what NumPy would have written
                    again = io.BytesIO()
                    np.save(again, out)
                    self.assertEqual(f.read(), again.getvalue())

    def test_arrays_that_are_no_tensors_of_ours_are_refused(self):
        a = np.zeros((1, 4, 1, 2), np.float32)
        for name, array in (("fortran", np.asfortranarray(np.zeros((1, 4, 3, 2), np.float32))), ("big-endian", a.astype(">f4")),
                            ("fields", np.zeros((1, 4, 1, 2), [("x", "<f4")])), ("objects", np.empty((1, 4, 1, 2), object)),
                            ("scalar", np.float32(1)), ("integers", a.astype(int)), ("booleans", a.astype(bool)),
                            ("complex", a.astype(np.complex64)), ("long double", a.astype(np.longdouble)),
                            ("text", a.astype("U4")), ("dates", np.zeros((1, 4, 1, 2), "M8[s]")), ("five", a[None])):
            with self.subTest(array=name):
                np.save(self.path("x.npy"), array, allow_pickle=True)
                self.refused(3, *self.attention(self.path("x.npy")), says="x.npy")
        np.savez(self.path("x.npz"), a=a)
        os.rename(self.path("x.npz"), self.path("z.npy"))
        self.refused(3, *self.attention(self.path("z.npy")), says="z.npy")

    @unittest.skipIf(safetensors is None, "the safetensors package is not installed")
    def test_the_safetensors_package_reads_all_that_we_write(self):
        rng = np.random.default_rng(4)
        for dtype in (np.float16, np.float32, np.float64):
            for shape in ((1, 7, 2, 3), (7, 2, 3), (2, 0, 1, 4)):
                a = rng.standard_normal(shape).astype(dtype)
                file = self.path("a.safetensors")
                safetensors.numpy.save_file({"a": a, "b": np.arange(5), "c": np.zeros((0, 3), np.float16)}, file, {"k": "v"})
                out = self.path("out.safetensors")
                self.ok("grad", *(w for n in ("q", "k", "v", "dout") for w in ("--" + n, file + ":a")), "--window", "0,0",
                        *(w for n in ("out", "lse", "dq", "dk", "dv") for w in ("--" + n, f"{out}:x/{n} é")))
                got = safetensors.numpy.load_file(out)
                self.assertEqual(set(got), {f"x/{n} é" for n in ("out", "lse", "dq", "dk", "dv")})
                wide = np.float64 if dtype == np.float64 else np.float32
                self.assertTrue(all(t.dtype == wide for t in got.values()))
                close = 1e-3 if dtype == np.float16 else 1e-6
                self.assertTrue(np.allclose(got["x/out é"], a, rtol=close))  # each query reads its own key alone,
                self.assertTrue(np.allclose(got["x/dv é"], a, rtol=close))  # and each value has one reader


if __name__ == "__main__":
    kit.main()
