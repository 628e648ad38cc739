"""Sizes that nobody means: answered at once, or refused at once with the reason."""
import os
import resource
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit


class Sizes(kit.Case):
    def limited(self, *args):
        """Runs with little processor time and, unless a sanitizer needs it, little memory."""

        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60) if kit.sanitized() else (5, 5))
            if not kit.sanitized():
                resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

        return subprocess.run([kit.RINGATTN, *map(str, args)], capture_output=True, text=True, timeout=300, preexec_fn=limit)

    def test_a_plan_takes_no_memory_for_each_batch_entry(self):
        done = self.limited("plan", "--batch", "1000000000000", "--seq", 64, "--heads", 1, "--head-dim", 1, "--ring-size", 2)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_key_ranges_of_a_huge_batch_are_refused_at_once(self):
        for command in (["plan"], ["draw"], ["why", "--query", 1, "--key", 1]):
            done = self.limited(*command, "--batch", "1000000000", "--key-range", "0:10", "--seq", 64)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("--key-range", done.stderr)
        self.assertEqual(self.limited("plan", "--batch", "1K", "--key-range", "0:10", "--seq", 64).returncode, 0)

    def test_pictures_of_huge_rings_are_refused_at_once(self):
        for ranks in (257, 65536):
            done = self.limited("draw", "--ring-size", ranks)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("--ring-size", done.stderr)
        self.assertEqual(self.limited("draw", "--ring-size", 256, "--seq", 16).returncode, 0)


if __name__ == "__main__":
    kit.main()
