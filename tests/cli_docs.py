"""The commands in the documentation run; help, completions and the manual page know every option."""
import os
import re
import shutil
import subprocess
import sys
import unittest

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "cli")]
import kit
import pages

ROOT = str(pages.ROOT)
PAGES = [str(page.relative_to(ROOT)) for page in pages.PAGES]
COMMANDS = ["run", "grad", "verify", "bench", "memory", "plan", "why", "draw", "info", "demo"]


def options_of(command):
    return re.findall(r"^  --([a-z-]+)", kit.run(command, "--help").stdout, re.M)


def commands_of(page):
    """(command line, what it prints or None) of a page's sh blocks."""
    found = []
    for block in pages.blocks(pages.ROOT / page):
        if block.language == "sh":
            lines = pages.commands(block.code)
            assert block.expected is None or len(lines) == 1, f"{page}:{block.line}: one command for a block of what it prints"
            found += [(line, block.expected) for line in lines]
    return found


class Docs(kit.Case):
    def setUp(self):
        super().setUp()
        for name, array in zip(("q", "k", "v", "dout"), kit.random_arrays(np.random.default_rng(0), 1, 200, 200, 4, 2, 16)):
            self.save(name + ".npy", array)
        with open(self.path("hosts"), "w") as f:
            f.write("localhost slots=8\n")
        os.makedirs(self.path("docs/images"))
        shutil.copy(os.path.join(ROOT, "examples", "attention.c"), self.path("program.c"))
        os.mkdir(self.path("bin"))
        with open(self.path("bin/python"), "w") as f:  # a link would lose the packages of a virtual environment
            f.write(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        os.chmod(self.path("bin/python"), 0o755)
        build = os.environ.get("RA_BUILD", os.path.dirname(kit.RINGATTN))
        here = os.path.dirname(os.path.abspath(kit.RINGATTN))
        self.environment = {**os.environ, "PATH": ":".join([self.path("bin"), here, os.environ["PATH"]]),
                            "PYTHONPATH": os.path.join(ROOT, "python"),
                            "RINGATTN_LIBRARY": os.path.join(build, "libringattn.so"),
                            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                            "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        self.build = build

    def install(self):
        """What `make install` leaves, where pkg-config and the loader find it."""
        prefix = self.path("prefix")
        subprocess.run(["cmake", "--install", self.build, "--prefix", prefix], check=True, capture_output=True)
        found = [os.path.join(d, n) for d, _, names in os.walk(prefix) for n in names]
        pc = next(n for n in found if n.endswith("ringattn.pc"))
        self.environment["PKG_CONFIG_PATH"] = os.path.dirname(pc)
        self.environment["LD_LIBRARY_PATH"] = os.path.dirname(os.path.dirname(pc))

    def cannot_run(self, line):
        """Why a command cannot be run here, or None."""
        word = line.split()[0]
        if word in ("make", "pip"):
            return "it builds, installs or runs the whole, which the other tests and the package's own do"
        if word == "srun":
            return None if shutil.which("srun") else "srun is not installed"
        if word == "mpirun":
            modules = [m for m in self.json("info")["mpi"] if m["available"]]
            return None if shutil.which("mpirun") and modules else "there is no MPI launcher with a module"
        if word == "cc":
            return "consumers are built without the sanitizer's run-time" if kit.sanitized() or os.environ.get(
                "RA_SANITIZED") else None
        if word == "torchrun" or line.startswith("python examples/"):
            return "Python's own tests run it, where torch is"
        if line.startswith("python "):
            needed = subprocess.run([sys.executable, "-c", "import matplotlib, numpy"], capture_output=True)
            if kit.sanitized() or os.environ.get("RA_SANITIZED"):
                return "a sanitized library does not load into a plain interpreter"
            return "matplotlib is not installed" if needed.returncode else None
        return None

    def test_every_command_in_the_pages_runs(self):
        lines = []
        for page in PAGES:
            found = commands_of(page)
            if page in ("README.md", "docs/cli.md", "docs/semantics.md", "docs/numerics.md", "docs/distributed.md"):
                self.assertGreater(len(found), 1, page)
            lines += [(page, line, expected) for line, expected in found]
        for page, line, expected in lines:
            with self.subTest(page=page, line=line):
                self.assertIn(line.split()[0], ("ringattn", "mpirun", "srun", "make", "pip", "cc", "python", "torchrun"))
                reason = self.cannot_run(line)
                if reason:
                    print(f"not run: {line}: {reason}")
                    continue
                if line.startswith("cc "):
                    self.install()
                if line.startswith("ringattn memory") and not kit.LONG:  # the shortest of the lengths stands for the others
                    line = re.sub(r"(--seq \d+),[\d,]+", r"\1", line)
                done = subprocess.run(["bash", "-c", line], cwd=self.directory, env=self.environment, capture_output=True,
                                      text=True, timeout=900)
                self.assertEqual(done.returncode, 0, f"{line}\n{done.stdout}{done.stderr}")
                if expected is not None:
                    self.assertEqual(done.stdout, expected, line)
                if line.startswith("cc "):
                    subprocess.run([self.path("a.out")], check=True, capture_output=True, env=self.environment)
        self.assertIn("pattern.svg", self.files())
        shown = [path for path in (pages.ROOT / "docs" / "images").glob("*.svg") if path.name in self.files()]
        self.assertTrue(shown)
        for path in shown:  # a picture is what the command above it draws
            with open(self.path(path.name)) as made:
                self.assertEqual(made.read(), path.read_text(), path.name)
        for command in COMMANDS:
            self.assertTrue(any(line.startswith("ringattn " + command) for _, line, _ in lines), command)

    def test_every_file_that_the_architecture_names_exists(self):
        names = re.findall(r"`([\w.*/-]+/[\w.*/-]*)`", pages.prose(pages.ROOT / "docs" / "architecture.md"))
        self.assertGreater(len(names), 40)
        names += re.findall(r">((?:cli|include|python|src)/[\w./]*)", (pages.ROOT / "docs/images/architecture.svg").read_text())
        for name in names:
            self.assertTrue(list(pages.ROOT.glob(name)), name)

    def test_every_make_target_in_the_pages_exists(self):
        with open(os.path.join(ROOT, "Makefile")) as f:
            targets = re.findall(r"^([a-z-]+):", f.read(), re.M)
        for page in PAGES:
            with open(os.path.join(ROOT, page)) as f:
                text = f.read()
            for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.M):
                self.assertIn(target, targets, page)

    def test_every_link_in_the_pages_leads_somewhere(self):
        def headings(page):
            lines = re.findall(r"^#+ (.*)$", pages.prose(page), re.M)
            return [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines]

        for page in [*pages.PAGES, *sorted((pages.ROOT / "bench").glob("**/*.md"))]:
            for link in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
                if re.match(r"\w+:", link):
                    continue  # to another site
                name, _, heading = link.partition("#")
                target = page.parent / name if name else page
                self.assertTrue(target.exists(), f"{page}: {link}")
                if heading and target.suffix == ".md":
                    self.assertIn(heading, headings(target), f"{page}: {link}")

    def test_help_exists_for_every_command_and_goes_to_stdout(self):
        overview = self.ok("--help").stdout
        for command in COMMANDS:
            self.assertIn("\n  " + command + " ", overview)
            done = self.ok(command, "--help")
            self.assertIn("usage: ringattn " + command, done.stdout)
            self.assertEqual(done.stderr, "")
            self.assertTrue(all(len(line) <= 120 for line in done.stdout.splitlines()), command)
        self.assertRegex(self.ok("--version").stdout, r"^ringattn \d+\.\d+\.\d+\n$")

    def test_every_environment_variable_that_the_code_reads_is_in_the_guide_and_the_manual_page(self):
        read = {"c": set(), "py": set()}
        for folder in ("src", "cli", "python/ringattn"):
            for path in sorted((pages.ROOT / folder).rglob("*")):
                if path.suffix in (".c", ".h", ".cu", ".cuh", ".py"):
                    pattern = r'(?:getenv\(|os\.environ(?:\.get\(|\[))"(RINGATTN_\w+)"'
                    read["py" if path.suffix == ".py" else "c"] |= set(re.findall(pattern, path.read_text()))
        with open(os.path.join(ROOT, "docs", "cli.md")) as f:
            table = re.findall(r"^\| `(RINGATTN_\w+)` \|", f.read(), re.M)
        self.assertEqual(sorted(read["c"] | read["py"]), sorted(table))
        self.assertEqual(sorted(read["c"]), sorted(re.findall(r"^\.B (RINGATTN_\w+)$", self.ok("man").stdout, re.M)))

    def test_options_of_the_interface_are_all_there(self):
        shared = set("""segment-lengths dilation-rates like combine offset dilate-queries causal window key-range scale dropout
                     seed ring-size layout query-placement schedule bucket transport device dtype kernel threads timeout
                     start-timeout call-timeout memory-limit checksum offload trace json help""".split())
        idle = set("scale dropout seed transport timeout start-timeout call-timeout checksum trace".split())  # without computing
        unlisted = {"plan": idle, "why": idle | {"device", "dtype", "kernel", "threads", "offload"},
                    "draw": idle | {"device", "dtype", "kernel", "threads", "offload"}}
        shape = set("batch seq seq-q heads kv-heads head-dim".split())
        own = {"run": "q k v out lse", "grad": "q k v dout dq dk dv out lse", "verify": "cases", "bench": "pass repeat rank",
               "memory": "ring-sizes",
               "plan": "machine fit", "why": "query key head", "draw": "svg"}
        for command, names in own.items():
            expected = shared | set(names.split()) | (shape if command not in ("run", "grad") else set())
            listed = set(options_of(command))
            self.assertLessEqual(expected - unlisted.get(command, set()), listed, command)
            self.assertFalse(listed & unlisted.get(command, set()), command)

    def test_what_help_does_not_list_because_it_changes_nothing_is_still_taken(self):
        self.ok("why", "--query", 5, "--key", 3, "--seed", 1, "--threads", 2, "--timeout", 5, "--dtype", "f64", "--checksum")

    def test_help_names_a_command_in_either_order(self):
        self.assertEqual(self.ok("help", "plan").stdout, self.ok("plan", "--help").stdout)
        self.assertEqual(self.ok("help").stdout, self.ok("--help").stdout)
        self.assertEqual(self.ok("-V").stdout, self.ok("--version").stdout)
        self.refused(2, "help", "plam", says="plan")
        self.refused(2, "help", "plan", "why", says="one command")

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
        self.assertIn("laptop", complete("ringattn", "plan", "--machine", ""))
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
