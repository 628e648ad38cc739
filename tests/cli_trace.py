"""--trace writes a timeline that Perfetto reads: lanes without overlaps, transfers that end, bytes that add up."""
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit


class Trace(kit.Case):
    def trace(self, *args):
        value = self.json(*args, "--trace", self.path("t.json"))
        with open(self.path("t.json")) as f:
            return value, json.load(f)["traceEvents"]

    def test_a_ring_is_traced_in_full(self):
        repeat, ranks = 2, 3
        value, events = self.trace("bench", "--seq", 300, "--heads", 2, "--head-dim", 16, "--ring-size", ranks, "--schedule",
                                   "ring", "--bucket", 32,
                                   "--pass", "both", "--repeat", repeat)
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        self.assertEqual(names, {(r, t): f"rank {r}{' transfers' if t else ''}" for r in range(ranks) for t in range(2)})
        lanes = {}
        for e in events:
            if e["ph"] == "X":
                self.assertIn(e["name"], ("compute", "wait"))
                self.assertGreaterEqual(e["dur"], 0)
                lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        self.assertEqual(set(lanes), {(r, 0) for r in range(ranks)})
        for stretches in lanes.values():
            stretches.sort()
            for (_, end), (begin, _) in zip(stretches, stretches[1:]):
                self.assertLessEqual(end, begin + 0.002)  # times are rounded to nanoseconds
        open_, sent = {}, {}
        for e in sorted((e for e in events if e["ph"] in "be"), key=lambda e: (e["ts"], e["ph"] == "e")):
            key = (e["pid"], e["cat"], e["name"], e["id"])
            if e["ph"] == "b":
                self.assertNotIn(key, open_)
                open_[key] = e["ts"]
                if e["name"] == "send":
                    sent[e["pid"], e["cat"]] = sent.get((e["pid"], e["cat"]), 0) + e["args"]["bytes"]
            else:
                self.assertGreaterEqual(e["ts"], open_.pop(key))
        self.assertEqual(open_, {})
        for part, phase in (("fwd", "forward"), ("bwd", "backward")):
            self.assertEqual(max(v for (_, cat), v in sent.items() if cat == phase), value[part]["bytes_sent"] * (repeat + 1))

    def test_one_rank_and_failures(self):
        _, events = self.trace("bench", "--seq", 64, "--heads", 1, "--head-dim", 8, "--repeat", 1)
        self.assertTrue(any(e["ph"] == "X" and e["name"] == "compute" for e in events))
        before = self.files()
        self.refused(2, "plan", "--trace", self.path("x.json"), says="--trace")
        done = kit.run("bench", "--seq", 64, "--heads", 1, "--head-dim", 8, "--repeat", 1, "--trace", self.path("none/x.json"))
        self.assertEqual((done.returncode, done.stdout), (3, ""))
        self.assertEqual(self.files(), before)

    def test_a_place_that_cannot_be_written_is_found_before_outputs_are(self):
        q = self.path("q.npy")
        np.save(q, np.zeros((1, 4, 1, 8), np.float32))
        before = self.files()
        line = ["run", "--q", q, "--k", q, "--v", q, "--out", self.path("out.npy")]
        self.refused(3, *line, "--trace", self.path("none/x.json"), says="none/x.json")
        self.assertEqual(self.files(), before)
        self.assertEqual(kit.run(*line, "--trace", self.path("x.json")).returncode, 0)


if __name__ == "__main__":
    kit.main()
