"""The commands in the documentation run; help, completions and the manual page know every option."""
import os
import re
import shutil
import subprocess
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit

ROOT = os.environ.get("RA_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
PAGES = ["README.md", "docs/cli.md", "docs/semantics.md", "docs/numerics.md"]
COMMANDS = ["run", "grad", "verify", "bench", "memory", "plan", "why", "draw", "info", "demo"]


def options_of(command):
    return re.findall(r"^  --([a-z-]+)", kit.run(command, "--help").stdout, re.M)


class Docs(kit.Case):
    def test_every_command_in_the_pages_runs(self):
        lines = []
        for name in PAGES:
            with open(os.path.join(ROOT, name)) as f:
                page = f.read()
            blocks = re.findall(r"```sh\n(.*?)```", page, re.S)
            found = [line for block in blocks for line in block.splitlines() if line.startswith("ringattn ")]
            self.assertGreater(len(found), 1, name)
            lines += found
        for name, array in zip(("q", "k", "v", "dout"), kit.random_arrays(np.random.default_rng(0), 1, 200, 200, 4, 2, 16)):
            self.save(name + ".npy", array)
        for line in lines:
            with self.subTest(line=line):
                words = line.split()
                self.assertEqual(words[0], "ringattn")
                self.ok(*words[1:], cwd=self.directory)
        self.assertIn("pattern.svg", self.files())
        for command in COMMANDS:
            self.assertTrue(any(line.startswith("ringattn " + command) for line in lines), command)

    def test_help_exists_for_every_command_and_goes_to_stdout(self):
        overview = self.ok("--help").stdout
        for command in COMMANDS:
            self.assertIn("\n  " + command + " ", overview)
            done = self.ok(command, "--help")
            self.assertIn("usage: ringattn " + command, done.stdout)
            self.assertEqual(done.stderr, "")
            self.assertTrue(all(len(line) <= 120 for line in done.stdout.splitlines()), command)
        self.assertRegex(self.ok("--version").stdout, r"^ringattn \d+\.\d+\.\d+\n$")

    def test_options_of_the_interface_are_all_there(self):
        shared = set("""segment-lengths dilation-rates like combine offset dilate-queries causal window key-range scale dropout
                     seed ring-size layout query-placement schedule bucket transport device dtype kernel threads timeout
                     start-timeout memory-limit checksum offload trace json help""".split())
        shape = set("batch seq seq-q heads kv-heads head-dim".split())
        own = {"run": "q k v out lse", "grad": "q k v dout dq dk dv out lse", "verify": "cases", "bench": "pass repeat rank",
               "memory": "ring-sizes",
               "plan": "machine fit", "why": "query key head", "draw": "svg"}
        for command, names in own.items():
            expected = shared | set(names.split()) | (shape if command not in ("run", "grad") else set())
            self.assertLessEqual(expected, set(options_of(command)), command)

    def test_both_ways_to_give_a_value_are_the_same(self):
        self.assertEqual(self.ok("plan", "--seq", "100", "--json").stdout, self.ok("plan", "--seq=100", "--json").stdout)

    def test_bash_completion_offers_commands_options_and_values(self):
        script = self.ok("completion", "bash").stdout
        with open(self.path("complete"), "w") as f:
            f.write(script)

        def complete(*words):
            quoted = " ".join(repr(w) for w in words)
            code = f'source {self.path("complete")}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _ringattn'
            code += '; echo "${COMPREPLY[@]}"'
            return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()

        self.assertLessEqual(set(COMMANDS), set(complete("ringattn", "")))
        for command in COMMANDS:
            self.assertEqual(set(complete("ringattn", command, "--")), {"--" + o for o in options_of(command)}, command)
        self.assertEqual(complete("ringattn", "run", "--layout", "z"), ["zigzag"])
        self.assertEqual(complete("ringattn", "completion", "z"), ["zsh"])
        self.save("tensor.npy", np.zeros(1))
        self.assertEqual(complete("ringattn", "run", "--q", self.path("ten")), [self.path("tensor.npy")])

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh_completion_is_valid(self):
        with open(self.path("_ringattn"), "w") as f:
            f.write(self.ok("completion", "zsh").stdout)
        subprocess.run(["zsh", "-n", self.path("_ringattn")], check=True)

    def test_the_manual_page_lists_every_option(self):
        page = self.ok("man").stdout
        self.assertTrue(page.startswith(".TH RINGATTN 1"))
        for command in COMMANDS:
            for option in options_of(command):
                self.assertIn(".B \"\\-\\-" + option.replace("-", "\\-"), page)
        if shutil.which("groff"):
            done = subprocess.run(["groff", "-man", "-Tascii", "-ww", "-z"], input=page, capture_output=True, text=True)
            self.assertEqual(done.stderr, "")

    def test_the_manual_page_of_the_library_names_every_function(self):
        with open(os.path.join(ROOT, "include", "ringattn.h")) as f:
            functions = re.findall(r"^RA_API [^(]*?\b(ra_\w+)\(", f.read(), re.M)
        self.assertGreater(len(functions), 30)
        with open(os.path.join(ROOT, "docs", "ringattn.3")) as f:
            page = f.read()
        for name in functions:
            self.assertRegex(page, rf"\b{name}\b")
        if shutil.which("groff"):
            done = subprocess.run(["groff", "-man", "-Tascii", "-ww", "-z"], input=page, capture_output=True, text=True)
            self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    kit.main()
