"""The version stands in the public header; whatever else names it agrees. Links between the pages lead somewhere."""
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit

ROOT = os.path.realpath(os.environ.get("RA_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")))
BUILD = os.environ.get("RA_BUILD", os.path.dirname(kit.RINGATTN))


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def pages():
    """The Markdown files of the project, and of nothing that may lie beside it (builds, environments)."""
    yield from (os.path.join(ROOT, name) for name in os.listdir(ROOT) if name.endswith(".md"))
    for folder in ("bench", "docs", "examples", "python", "tests"):
        for directory, _, names in os.walk(os.path.join(ROOT, folder)):
            yield from (os.path.join(directory, name) for name in names if name.endswith(".md"))


def anchors(text):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Release(kit.Case):
    def setUp(self):
        super().setUp()
        (self.version,) = re.findall(r'^#define RA_VERSION_STRING "(\d+\.\d+\.\d+)"$', read("include", "ringattn.h"), re.M)

    def test_program_and_build_have_the_version_of_the_header(self):
        self.assertEqual(self.ok("--version").stdout, f"ringattn {self.version}\n")
        with open(os.path.join(BUILD, "CMakeCache.txt"), encoding="utf-8") as file:
            self.assertIn(f"CMAKE_PROJECT_VERSION:STATIC={self.version}\n", file.read())

    def test_the_python_package_has_the_version_of_the_header(self):
        project = read("pyproject.toml")
        self.assertIn('dynamic = ["version"]', project)
        (expression,) = re.findall(r"^regex = '(.*)'$", project, re.M)
        self.assertEqual(re.search(expression, read("include", "ringattn.h"))["value"], self.version)
        if not kit.sanitized() and not os.environ.get("RA_SANITIZED"):
            environment = {**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"),
                           "RINGATTN_LIBRARY": os.path.join(BUILD, "libringattn.so")}
            code = "import ringattn; print(ringattn.__version__)"
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
            self.assertEqual(done.stdout.strip(), self.version)

    def test_the_changelog_begins_with_what_is_unreleased_and_then_this_version_and_its_tag(self):
        headings = re.findall(r"^## (.*)", read("CHANGELOG.md"), re.M)
        self.assertEqual(headings[0], "Unreleased")
        self.assertRegex(headings[1], rf"^{re.escape(self.version)}, tag v{re.escape(self.version)}, \d{{4}}-\d\d-\d\d$")
        for heading in headings[1:]:
            self.assertRegex(heading, r"^(\d+\.\d+\.\d+), tag v\1, \d{4}-\d\d-\d\d$")

    def test_the_citation_names_this_version_and_its_date(self):
        citation = read("CITATION.cff")
        self.assertIn(f"\nversion: {self.version}\n", citation)
        (date,) = re.findall(rf"^## {re.escape(self.version)}, tag .*, (\S+)$", read("CHANGELOG.md"), re.M)
        self.assertIn(f"\ndate-released: {date}\n", citation)

    def test_links_between_pages_lead_to_files_and_headings_that_exist(self):
        seen = 0
        for page in pages():
            text = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
            for link in re.findall(r"\]\(([^)\s]+)\)", text):
                if "://" in link:
                    continue
                with self.subTest(page=os.path.relpath(page, ROOT), link=link):
                    path, _, heading = link.partition("#")
                    target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
                    self.assertTrue(os.path.exists(target), "there is no such file")
                    if heading and target.endswith(".md"):
                        self.assertIn(heading, anchors(read(target)))
                    seen += 1
        self.assertGreater(seen, 30)

    def test_every_command_says_what_it_does_in_one_line_that_begins_with_a_verb(self):
        lines = re.findall(r"^  ([a-z]+) +(\S+) .*", self.ok("--help").stdout, re.M)
        self.assertEqual(len(lines), 12)
        for command, verb in lines:
            self.assertTrue(verb.islower() and verb.endswith("s"), f"{command}: {verb}")

    def test_commands_that_the_issue_templates_ask_for_exist(self):
        directory = os.path.join(ROOT, ".github", "ISSUE_TEMPLATE")
        text = "".join(read(directory, name) for name in os.listdir(directory)) + read("SECURITY.md")
        asked = set(re.findall(r"`ringattn ([a-z]+|--version)", text))
        self.assertLessEqual({"info", "bench", "verify", "plan"}, asked)
        for command in asked - {"--version"}:
            self.ok(command, "--help")


if __name__ == "__main__":
    kit.main()
