"""bench/forecast.py: what plan predicts beside what was measured, and the page that shows it."""
import json
import os
import re
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "cli"))
import kit  # noqa: E402

ROOT = os.path.realpath(os.environ.get("RA_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")))
BUILD = os.environ.get("RA_BUILD", os.path.join(ROOT, "build"))
STAND_IN = dict(os.environ, RINGATTN_MODULE_PATH=os.path.join(BUILD, "tests", "stand_in"))


def forecast(*words):
    line = [sys.executable, os.path.join(ROOT, "bench", "forecast.py"), "--program", kit.RINGATTN, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=True, env=STAND_IN).stdout


class Forecast(kit.Case):
    def test_the_page_shows_what_the_model_of_today_says_of_what_was_measured(self):
        table = forecast("--from", os.path.join(ROOT, "bench", "notes", "h200-forecast.json"))
        with open(os.path.join(ROOT, "docs", "scaling.md"), encoding="utf-8") as file:
            self.assertIn(table, file.read())
        cases, inside = map(int, re.search(r"Of the (\d+) cases .*, (\d+) are within 15 %", table).groups())
        self.assertGreaterEqual(inside, 0.8 * cases)

    def test_the_page_shows_the_scaling_that_plans_predict(self):
        with open(os.path.join(ROOT, "docs", "scaling.md"), encoding="utf-8") as file:
            page = file.read()
        rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.M)
        self.assertEqual([int(ranks) for ranks, _ in rows], [2**i for i in range(11)])
        dense, dilated = (line.split()[1:] for line in re.findall(r"^ringattn plan --machine h200x64 .*$", page, re.M))
        short, long, sparse = (self.json(*line) for line in (dense, [*dense, "--seq", "8M"], dilated))
        columns = short["strong_scaling"], long["strong_scaling"], short["weak_scaling"], sparse["strong_scaling"]
        for i, (_, cells) in enumerate(rows):
            for predicted, cell in zip((column[i] for column in columns), cells.split(" | "), strict=True):
                time, unit, share = re.fullmatch(r"([\d.]+) (s|min), (\d+) %", cell).groups()
                seconds = float(time) * {"s": 1, "min": 60}[unit]
                self.assertAlmostEqual(predicted["predicted_ms"] / 1e3 / seconds, 1, delta=0.005, msg=cell)
                self.assertAlmostEqual(100 * predicted["efficiency"], int(share), delta=0.51, msg=cell)

    def test_it_measures_and_predicts(self):
        shown = forecast("--groups", "offload", "--seq", 300, "--repeat", 1, "--out", self.path("found"))
        with open(self.path("found.json"), encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        self.assertEqual([row["pass"] for row in rows], ["fwd", "bwd"] * 2)
        self.assertTrue(all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 for row in rows))
        self.assertIn("| offload | n=300 h=8 D=64 causal offload | fwd |", shown)


if __name__ == "__main__":
    unittest.main()
