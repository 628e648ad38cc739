"""Every command, done or refused, gives its memory back; for builds with the address sanitizer."""
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit

SMALL = ["--seq", 40, "--heads", 2, "--head-dim", 8, "--ring-size", 2]


class Leaks(kit.Case):
    def setUp(self):
        super().setUp()
        if not kit.sanitized():
            self.skipTest("this build has no address sanitizer")
        self.environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}

    def clean(self, code, *args):
        done = kit.run(*args, env=self.environment, timeout=300)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertNotIn("LeakSanitizer", done.stderr)

    def test_commands_that_are_done(self):
        for name in ("q", "k", "v", "dout"):
            self.save(name + ".npy", np.ones((1, 9, 2, 4), np.float32))
        f = lambda n: self.path(n + ".npy")
        self.clean(0, "grad", "--q", f("q"), "--k", f("k"), "--v", f("v"), "--dout", f("dout"), "--dq",
                   self.path("g.safetensors:a"), "--dk",
                   self.path("g.safetensors:b"), "--dv", f("dv"), "--ring-size", 3, "--key-range", "1:7", "--trace",
                   self.path("t.json"))
        for args in (["verify", "--cases", 3], ["bench", *SMALL, "--pass", "both", "--repeat", 1, "--json"],
                     ["bench", *SMALL, "--rank", 1],
                     ["memory", *SMALL[:6], "--ring-sizes", "1,2", "--json"], ["plan", *SMALL, "--machine", "laptop", "--json"],
                     ["plan", *SMALL, "--fit", "--memory-limit", "1G", "--json"],
                     ["why", "--query", 3, "--key", 4, *SMALL, "--json"],
                     ["draw", *SMALL, "--svg", self.path("x.svg"), "--json"], ["info", "--json"]):
            with self.subTest(args=args):
                self.clean(0, *args)

    def test_commands_that_are_refused(self):
        self.save("q.npy", np.ones((1, 9, 2, 4), np.float32))
        for code, args in ((3, ["run", "--q", self.path("q.npy"), "--k", self.path("q.npy"), "--v", self.path("none.npy"),
                                "--out", self.path("o.npy")]),
                           (4, ["bench", "--memory-limit", "1K"]), (2, ["plan", "--heads", 3, "--kv-heads", 2])):
            with self.subTest(args=args):
                self.clean(code, *args)


if __name__ == "__main__":
    kit.main()
