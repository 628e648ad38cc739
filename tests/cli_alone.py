"""bench --rank on a GPU, without one: any rank of a job on the module that stands in for a GPU, whose streams take their time;
and bench/every_rank.py, which plays them all."""
import json
import os
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "cli"))
import kit  # noqa: E402

EVERY_RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench", "every_rank.py")
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
        self.refused(2, *shape, "--query-placement", "replicated", says="--rank needs --query-placement sharded", env=STAND_IN)


class EveryRank(kit.Case):
    def play(self, *args, env=STAND_IN):
        words = ["--program", kit.RINGATTN, "--out", self.path("ranks.json"), "--table", self.path("ranks.md"), "--ring-size", 3,
                 "--seq", 700, "--head-dim", 16, "--segment-lengths", "64,128,256", "--repeat", 1, *args]
        return subprocess.run([sys.executable, EVERY_RANK, *map(str, words)], capture_output=True, text=True, timeout=300, env=env)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def test_every_rank_is_played_and_an_interrupted_run_goes_on(self):
        for more in (["--device", "cuda"], ["--device", "cpu", "--causal", "--dtype", "f32"]):
            done = self.play(*more)
            self.assertEqual(done.returncode, 0, done.stderr)
            result, text = json.loads(self.read("ranks.json")), self.read("ranks.md")
            self.assertEqual([row["rank"] for row in result["ranks"]], [0, 1, 2])
            for row in result["ranks"]:
                self.assertFalse(row["failed"])
                self.assertEqual(row["peak_bytes"], row["planned_bytes"])
                self.assertEqual(set(row["worst"]), {"out", "lse", "dq"})
            self.assertIn("| ranks played | 3 of 3 |", text)
            self.assertIn("| right, with the planned peak of memory | 3 of 3 |", text)
            self.assertEqual("stand-in" in text, more[1] == "cuda")
            del result["ranks"][1]
            with open(self.path("ranks.json"), "w", encoding="utf-8") as file:
                json.dump(result, file)
            done = self.play(*more)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("rank "), 1, done.stderr)
            self.assertEqual({row["rank"] for row in json.loads(self.read("ranks.json"))["ranks"]}, {0, 1, 2})
            done = self.play(*more, "--seq", 701)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("holds another run, where seq is 700 and not 701", done.stderr)
            os.remove(self.path("ranks.json"))

    def test_a_rank_that_is_wrong_is_said_to_be_wrong(self):
        done = self.play(env=dict(STAND_IN, RINGATTN_STAND_IN_GENERATES="otherwise"))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("| right, with the planned peak of memory | 0 of 3 |", self.read("ranks.md"))
        os.remove(self.path("ranks.json"))
        done = self.play("--seq", "none")
        self.assertIn("--seq", done.stderr)


if __name__ == "__main__":
    unittest.main()
