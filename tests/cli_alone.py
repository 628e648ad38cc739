"""bench --rank on a GPU, without one: any rank of a job on the module that stands in for a GPU, whose streams take their time."""
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "cli"))
import kit  # noqa: E402

BUILD = os.environ.get("RA_BUILD", os.path.join(os.path.dirname(__file__), "..", "build"))
STAND_IN = dict(os.environ, RINGATTN_MODULE_PATH=os.path.join(BUILD, "tests", "stand_in"))
DILATED = ["--segment-lengths", "64,128,256", "--dilation-rates", "1,2,4"]
JOBS = (  # ranks to play, ring size, options
    ((0, 3, 7), 8, [*DILATED, "--dtype", "bf16"]),
    ((2,), 5, [*DILATED, "--dtype", "f32", "--causal", "--schedule", "ring", "--bucket", 32]),
    ((1, 5), 6, ["--causal", "--layout", "zigzag", "--dtype", "bf16", "--schedule", "ring"]),
    ((0, 2), 3, ["--dtype", "f32", "--schedule", "gather", "--batch", 2]),
    ((3,), 4, ["--layout", "striped", "--kv-heads", 1, "--dropout", 0.1, "--segment-lengths", 100, "--dtype", "f16"]),
    ((1,), 2, ["--head-dim", 17, "--window", "90,20", "--schedule", "ring", "--bucket", 50, "--offset", "head"]),
)


class Alone(kit.Case):
    def test_a_rank_on_a_gpu_is_right_and_holds_and_sends_what_was_planned(self):
        for ranks, ring, more in JOBS:
            shape = ["--seq", 900, "--heads", 3, "--head-dim", 16, "--ring-size", ring, "--device", "cuda", *more]
            whole = self.json("plan", *shape, "--pass", "both", env=STAND_IN)
            for rank in ranks:
                with self.subTest(rank=rank, ring=ring, more=more):
                    value = self.json("bench", *shape, "--rank", rank, "--pass", "both", "--repeat", 2, env=STAND_IN)
                    planned = whole["ranks"][rank]
                    self.assertFalse(value["failed"], value["worst"])
                    self.assertEqual(set(value["worst"]), {"out", "lse", "dq"})
                    self.assertEqual(value["sampled_rows"], min(1000, planned["rows"]))
                    self.assertEqual(value["peak_bytes"], value["planned_bytes"])
                    self.assertEqual(value["planned_bytes"], planned["memory_bytes"])
                    self.assertEqual(value["fwd"]["bytes_sent"], planned["bytes_sent"])
                    self.assertEqual(value["bwd"]["bytes_sent"], planned["bytes_sent_backward"])
                    self.assertEqual(value["pairs"], planned["pairs"])
                    self.assertEqual(value["kernel"], "cuda")
                    self.assertEqual(value["path"], "f32" if value["dtype"] == "f32" else "sm80")

    def test_forward_alone_and_one_rank_of_one(self):
        for rank, ring in ((1, 3), (0, 1)):
            value = self.json("bench", "--seq", 300, "--heads", 2, "--head-dim", 16, "--rank", rank, "--ring-size", ring, "--pass",
                              "fwd", "--device", "cuda", "--repeat", 1, env=STAND_IN)
            self.assertFalse(value["failed"])
            self.assertEqual(set(value["worst"]), {"out", "lse"})
            self.assertNotIn("bwd", value)

    def test_rows_that_the_gpu_makes_otherwise_are_found(self):
        environment = dict(STAND_IN, RINGATTN_STAND_IN_GENERATES="otherwise")
        shape = ["--seq", 300, "--heads", 2, "--head-dim", 16, "--rank", 1, "--ring-size", 3, "--device", "cuda", "--repeat", 1]
        done = kit.run("bench", *shape, "--json", env=environment)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn('"failed": true', done.stdout)

    def test_what_cannot_be_played_is_refused(self):
        shape = ["bench", "--seq", 64, "--rank", 1, "--ring-size", 4, "--device", "cuda"]
        self.refused(6, *shape, "--dtype", "f64", says="f32, bf16 and f16", env=STAND_IN)
        self.refused(6, *shape, "--query-placement", "replicated", says="query_placement sharded", env=STAND_IN)


if __name__ == "__main__":
    unittest.main()
