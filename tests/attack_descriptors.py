"""What a parent leaves behind: closed descriptors, which must not become output files, and signals that it ignores."""
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit


class Parent(kit.Case):
    def setUp(self):
        super().setUp()
        for name in ("q", "k", "v"):
            self.save(name + ".npy", np.ones((16, 2, 8), np.float32))
        self.words = [w for n in ("q", "k", "v", "out") for w in ("--" + n, self.path(n + ".npy"))]

    def closed(self, descriptors, *args, env=None):
        closing = " ".join(f"{d}>&-" for d in descriptors)
        return subprocess.run(["sh", "-c", f'exec "$@" {closing}', "sh", kit.RINGATTN, *args], timeout=120,
                              capture_output=True, env=env)

    def test_closed_descriptors_do_not_become_output_files(self):
        noisy = {**os.environ, "RINGATTN_DEBUG": "trace"}  # log lines that would go into the file
        for descriptors in ((2,), (0, 2), (0, 1, 2), (1, 2), (0,)):
            done = self.closed(descriptors, "run", *self.words, "--ring-size", "2", env=noisy)
            self.assertEqual(done.returncode, 3 if 1 in descriptors else 0, (descriptors, done))
            np.testing.assert_array_equal(self.load("out.npy"), np.ones((16, 2, 8), np.float32))
            os.unlink(self.path("out.npy"))

    def test_a_closed_stdout_is_an_error(self):
        done = self.closed((1,), "info")
        self.assertEqual(done.returncode, 3)
        self.assertIn(b"standard output", done.stderr)

    def ignores(self, pid, number):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
        return int(mask, 16) >> (number - 1) & 1

    def test_signals_that_the_parent_ignores_stay_ignored(self):
        for number, ignored in ((signal.SIGHUP, True), (signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGHUP, False)):
            child = subprocess.Popen([kit.RINGATTN, "bench", "--seq", "512", "--repeat", "100000"], stdout=subprocess.DEVNULL,
                                     preexec_fn=lambda: signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL))
            until = time.monotonic() + 60
            while not self.ignores(child.pid, signal.SIGXFSZ) and time.monotonic() < until:  # the last signal that it sets
                time.sleep(0.01)
            child.send_signal(number)
            try:
                code = child.wait(timeout=1 if ignored else 60)
            except subprocess.TimeoutExpired:
                code = None
            child.kill()
            child.wait()
            self.assertEqual(code, None if ignored else 128 + number)


if __name__ == "__main__":
    kit.main()
