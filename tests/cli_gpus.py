"""Several GPUs, without any: the module that stands in for a GPU plays as many as it is told to, and its kernels take no other
GPU's memory. Ranks of a process are dealt among them; those that are processes are cli_mpi's."""
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit  # noqa: E402

BUILD = os.environ.get("RA_BUILD", os.path.join(os.path.dirname(__file__), "..", "build"))
SHAPE = ["--seq", 300, "--heads", 2, "--head-dim", 16, "--dtype", "bf16", "--causal", "--device", "cuda"]


def gpus(count, **more):
    """The environment in which there are so many."""
    return dict(os.environ, RINGATTN_MODULE_PATH=os.path.join(BUILD, "tests", "stand_in"), RINGATTN_STAND_IN_GPUS=str(count), **more)


class SeveralGpus(kit.Case):
    def places(self, stderr):
        """The GPU of each rank, as the log says."""
        said = [line.split() for line in stderr.splitlines() if " computes on GPU " in line]
        return {int(words[words.index("rank") + 1]): int(words[-1]) for words in said}

    def test_info_shows_all(self):
        self.assertEqual(len(self.json("info", env=gpus(3))["gpus"]), 3)
        self.assertEqual(kit.run("info", env=gpus(3)).stdout.count("stand-in for a GPU"), 3)

    def test_ranks_that_are_threads_are_dealt_among_them(self):
        for count in (1, 2, 4):
            with self.subTest(count=count):
                done = kit.run("bench", *SHAPE, "--ring-size", 4, "--repeat", 1, "--pass", "both", env=gpus(count, RINGATTN_DEBUG="info"))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(self.places(done.stderr), {rank: rank % count for rank in range(4)})

    def test_values_and_gradients_are_right(self):
        for schedule in ("ring", "gather"):
            value = self.json("verify", *SHAPE, "--ring-size", 3, "--schedule", schedule, "--bucket", 30, env=gpus(2))
            self.assertEqual((value["cases"], value["failed"]), (1, 0))

    def test_scaling_leaves_out_as_few_ranks_as_hold_more_than_a_gpu_takes(self):
        large = ["--seq", 2**31, "--heads", 1, "--segment-lengths", 1024, "--dtype", "bf16", "--device", "cuda"]
        value = self.json("plan", *large, "--ring-size", 8, "--machine", "h200x8", env=gpus(1))
        known = [row["predicted_ms"] is not None for row in value["strong_scaling"]]
        self.assertEqual(known, [False, False] + [True] * 9)  # 2^30 rows and more
        self.assertTrue(all(row["efficiency"] is None for row in value["strong_scaling"]))

    def test_the_longest_sequence_that_fits_is_found_where_longer_ones_have_more_rows_than_a_gpu_takes(self):
        shape = ["plan", "--fit", "--heads", 8, "--head-dim", 64, "--dtype", "bf16", "--device", "cuda"]
        for ranks in (1, 8):
            value = self.json(*shape, "--memory-limit", "80G", "--ring-size", ranks, env=gpus(1))
            self.assertGreater(value["fit"]["memory_bytes"], 0.99 * (80 << 30))
        value = self.json(*shape[:3], 1, *shape[4:], "--segment-lengths", 1024, "--memory-limit", "9999G", env=gpus(1))
        self.assertLess(0.99 * 2**30, value["fit"]["seq"], 2**30)  # rows end first

    def test_a_type_that_gpus_lack_is_named_by_its_option(self):
        self.refused(6, "bench", "--seq", 64, "--device", "cuda", "--dtype", "f64", says="--dtype f64", env=gpus(1))

    def test_random_cases_are_of_types_that_gpus_have(self):
        value = self.json("verify", "--cases", 12, "--device", "cuda", env=gpus(3))
        self.assertEqual((value["cases"], value["failed"]), (12, 0))


if __name__ == "__main__":
    unittest.main()
