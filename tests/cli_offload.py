"""--offload without a GPU: tensors stay in host memory, and blocks of them pass through the module that stands in for a GPU."""
import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "cli"))
import kit  # noqa: E402

BUILD = os.environ.get("RA_BUILD", os.path.join(os.path.dirname(__file__), "..", "build"))
STAND_IN = dict(os.environ, RINGATTN_MODULE_PATH=os.path.join(BUILD, "tests", "stand_in"))
OFFLOAD = ["--device", "cuda", "--offload"]
DILATED = ["--segment-lengths", "64,128,256", "--dilation-rates", "1,2,4"]


class Offload(kit.Case):
    def test_values_and_gradients_are_right(self):
        for more in (["--causal", "--dtype", "bf16"], [*DILATED, "--dtype", "f16", "--kv-heads", 3], ["--dtype", "f32", "--batch", 2]):
            with self.subTest(more=more):
                value = self.json("verify", "--seq", 400, "--heads", 3, "--head-dim", 16, "--bucket", 90, *OFFLOAD, *more, env=STAND_IN)
                self.assertEqual((value["cases"], value["failed"]), (1, 0))

    def test_random_cases_have_one_rank(self):
        value = self.json("verify", "--cases", 8, "--dtype", "bf16", "--bucket", 40, *OFFLOAD, env=STAND_IN)
        self.assertEqual((value["cases"], value["failed"]), (8, 0))

    def test_the_gpu_holds_what_was_planned_and_less_than_k_and_v(self):
        shape = ["--seq", 2048, "--heads", 2, "--head-dim", 16, "--dtype", "bf16", "--causal", "--pass", "both"]
        kv = 2 * 2048 * 2 * 16 * 2
        for limit in (kv - 1, kv * 2 // 3):
            value = self.json("bench", *shape, "--repeat", 1, *OFFLOAD, "--memory-limit", limit, env=STAND_IN)
            self.assertEqual(value["peak_bytes"], value["planned_bytes"])
            self.assertLessEqual(value["peak_bytes"], limit)
            self.assertIn("offload", value["reason"])
            planned = self.json("plan", *shape, *OFFLOAD, "--memory-limit", limit, env=STAND_IN)
            self.assertEqual(planned["ranks"][0]["memory_bytes"], value["planned_bytes"])

    def test_a_limit_that_no_block_meets_is_said(self):
        self.refused(4, "bench", "--seq", 4096, *OFFLOAD, "--memory-limit", 100, says="--memory-limit", env=STAND_IN)
        self.refused(4, "bench", "--seq", 4096, *OFFLOAD, "--memory-limit", "1M", "--bucket", 4096, says="--memory-limit", env=STAND_IN)

    def test_gradients_of_files_are_those_of_tensors_on_the_gpu(self):
        rng = np.random.default_rng(5)
        f = {n: self.save(n + ".npy", rng.standard_normal([1, 300, 2, 16], dtype=np.float32)) for n in ("q", "k", "v", "dout")}
        inputs = [word for n in f for word in ("--" + n, f[n])]
        for how, more in (("whole", []), ("blocks", ["--offload", "--bucket", 70])):
            outputs = [word for n in ("out", "dq", "dk", "dv") for word in ("--" + n, self.path(f"{how}_{n}.npy"))]
            self.ok("grad", *inputs, *outputs, "--causal", "--device", "cuda", *more, env=STAND_IN)
        for n in ("out", "dq", "dk", "dv"):
            np.testing.assert_allclose(self.load(f"blocks_{n}.npy"), self.load(f"whole_{n}.npy"), atol=1e-5)

    def test_a_prediction_counts_what_goes_between_host_and_gpu(self):
        shape = ["--heads", 8, "--dtype", "bf16", "--device", "cuda", "--machine", "h200", "--pass", "both"]
        for seq, more, least, most in ((1 << 20, ["--causal"], 1, 1.1), (1 << 24, ["--segment-lengths", 2048], 5, 100)):
            whole = self.json("plan", "--seq", seq, *shape, *more, env=STAND_IN)["predicted_ms"]
            blocks = self.json("plan", "--seq", seq, *shape, *more, "--offload", env=STAND_IN)["predicted_ms"]
            self.assertTrue(least < blocks / whole < most, blocks / whole)  # dense: hidden; short segments: there is nothing to hide behind

    def test_the_longest_sequence_that_fits_is_longer_than_the_gpu_holds(self):
        shape = ["--heads", 8, "--head-dim", 64, "--dtype", "bf16", "--causal", *OFFLOAD]
        value = self.json("plan", "--fit", "--pass", "fwd", "--memory-limit", "300M", "--bucket", 1000, *shape, env=STAND_IN)
        self.assertGreater(value["fit"]["seq"], 255 * 1000)  # so many blocks are looked at
        value = self.json("plan", "--fit", "--memory-limit", "20M", "--segment-lengths", 64, *shape, env=STAND_IN)
        fit = value["fit"]
        self.assertGreater(fit["seq"] * 8 * 64 * 2, 20 << 20)
        self.assertLessEqual(fit["memory_bytes"], 20 << 20)
        again = self.json("plan", *fit["cli"].split()[2:], env=STAND_IN)  # without bench
        self.assertEqual(again["ranks"][0]["memory_bytes"], fit["memory_bytes"])
        self.assertIn("desc.offload = true;\ndesc.memory_limit = 20971520;", fit["c"])
        self.assertIn("no offload", fit["python"])  # rather than a call that does something else
        self.refused(4, "plan", "--fit", "--memory-limit", 100, *shape, says="not even one token", env=STAND_IN)

    def test_what_it_cannot_do_is_said(self):
        self.refused(6, "bench", "--seq", 64, "--offload", says="--device cuda")
        self.refused(6, "bench", "--seq", 64, *OFFLOAD, "--ring-size", 2, says="one rank", env=STAND_IN)


if __name__ == "__main__":
    unittest.main()
