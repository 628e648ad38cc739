"""Hostile and odd files: each ends with its exact exit code, and what NumPy and safetensors refuse we refuse."""
import io
import os
import sys
import unittest
import warnings

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import corpus
import kit

try:
    import safetensors
except ImportError:
    safetensors = None


class Corpus(kit.Case):
    def setUp(self):
        super().setUp()
        self.save("k.npy", np.frombuffer(corpus.BODY, np.float32).reshape(1, 4, 1, 2))

    def attempt(self, path, code):
        before = self.files()
        args = ["run", "--q", path, "--k", self.path("k.npy"), "--v", self.path("k.npy"), "--out", self.path("out.npy")]
        if code:
            self.refused(code, *args)
            self.assertEqual(self.files(), before)
        else:
            self.ok(*args)
            os.unlink(self.path("out.npy"))

    def put(self, name, data):
        with open(self.path(name), "wb") as f:
            f.write(data)
        return self.path(name)

    def test_the_corpus_is_large(self):
        self.assertGreaterEqual(len(list(corpus.npy_files())) + len(list(corpus.safetensors_files())), 60)

    def test_npy_files(self):
        for name, data, code in corpus.npy_files():
            with self.subTest(file=name):
                self.attempt(self.put("x.npy", data), code)

    def test_safetensors_files(self):
        for name, data, code in corpus.safetensors_files():
            with self.subTest(file=name):
                self.attempt(self.put("x.safetensors", data) + ":q", code)

    def test_any_file_cut_at_any_byte_is_refused(self):
        for generator, file_name, suffix in ((corpus.npy_files, "x.npy", ""),
                                             (corpus.safetensors_files, "x.safetensors", ":q")):
            whole = next(generator())[1]
            for length in range(0, len(whole), 1 if kit.LONG else 5):
                with self.subTest(file=file_name, length=length):
                    self.attempt(self.put(file_name, whole[:length]) + suffix, corpus.FILE)

    def test_what_numpy_refuses_we_refuse(self):
        warnings.simplefilter("ignore")  # of a header that Python 2 wrote
        for name, data, code in corpus.npy_files():
            try:
                array = np.load(io.BytesIO(data), allow_pickle=False)
                refused = not isinstance(array, np.ndarray)
            except Exception:
                refused = True
            if refused:
                with self.subTest(file=name):
                    self.assertNotEqual(code, 0)

    @unittest.skipIf(safetensors is None, "the safetensors package is not installed")
    def test_what_safetensors_refuses_we_refuse(self):
        for name, data, code in corpus.safetensors_files():
            try:
                safetensors.deserialize(data)
                refused = False
            except Exception:
                refused = True
            if refused:
                with self.subTest(file=name):
                    self.assertNotEqual(code, 0)


if __name__ == "__main__":
    kit.main()
