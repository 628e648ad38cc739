"""The code of docs/comparison.md and of the README runs as it stands: our side of every port, on two ranks."""

import pathlib
import re
import warnings

import ringattn
from conftest import run_python

ROOT = pathlib.Path(__file__).parents[2]
WORKERS = pathlib.Path(__file__).parent / "workers"


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_our_side_of_every_port_gives_what_one_process_computes(tmp_path):
    script = tmp_path / "port.py"
    script.write_text("".join(blocks("docs/comparison.md")))
    assert script.read_text().count("assert torch.allclose") >= 6
    run_python(WORKERS / "forks.py", arguments=[2, script])


def test_every_library_has_a_version_a_source_and_a_port():
    page = (ROOT / "docs" / "comparison.md").read_text()
    libraries = re.findall(r"^\| \[(.*?)\]\(https://github\.com/\S+\).*? \| (\S.*?) \| (`.*) \|$", page, re.MULTILINE)
    assert len(libraries) == 6
    for name, version, _ in libraries:
        assert re.search(r"\d", version)
        assert f"### From {name}" in page


def test_the_code_of_the_readme_runs_without_a_warning_of_holes():
    (block,) = blocks("README.md")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ringattn.HolesWarning)
        names = {}
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (1, 4096, 8, 64)
