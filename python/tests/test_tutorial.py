"""The code of the pages and of the docstrings runs as it stands, and prints what the pages say."""

import contextlib
import doctest
import importlib.util
import io
import itertools
import os
import pathlib
import re
import runpy
import socket
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import ringattn
import ringattn.transformers
import torch
from conftest import HANGS, run_python

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
import pages  # noqa: E402

PAGES = [ROOT / "docs" / "python.md", ROOT / "docs" / "semantics.md", *sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))]
WORKERS = pathlib.Path(__file__).parent / "workers"
MODULES = [
    "_attention",
    "_check",
    "_config",
    "_draw",
    "_engine",
    "_info",
    "_lib",
    "_porting",
    "cache",
    "custom",
    "gradients",
    "helpers",
    "modules",
    "multihead",
    "plot",
    "sharding",
    "torch",
    "transformers",
]
NEEDS = {"_draw": "matplotlib", "transformers": "transformers"}


STEPS = {"examples/python/train_characters.py": ["--steps", "3"]}  # of more, which take longer


def run_here(script, arguments):
    """A script in this process, which has torch loaded already. Returns what it prints."""
    with mock.patch.object(sys, "argv", [script, *arguments]), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def start_script(words, folder):
    """Runs `python script ...` or `torchrun --option value ... script ...`. Returns what it prints."""
    place = next(place for place, word in enumerate(words) if word.endswith(".py"))
    launcher, (script, *arguments) = words[:place], words[place:]
    arguments += STEPS.get(script, [])
    if launcher == ["python"] and script in STEPS:
        return run_here(script, arguments)
    if launcher == ["python"]:
        return run_python(script, arguments=arguments, cwd=folder).stdout
    assert launcher[0] == "torchrun"
    options = dict(zip(launcher[1::2], launcher[2::2]))
    if len(options) > 1:
        return start_torchrun(options, script, folder)
    # Ranks are children of one process: loading torch takes longer than most scripts.
    return run_python(WORKERS / "forks.py", arguments=[options["--nproc-per-node"], script, *arguments], cwd=folder).stdout


def start_torchrun(options, script, folder):
    """torchrun itself, once for each host; all hosts are this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"--rdzv-backend": "c10d", "--rdzv-endpoint": f"127.0.0.1:{probe.getsockname()[1]}"}
    options = {**options, **meeting, "--local-addr": "127.0.0.1"}
    command = [sys.executable, "-m", "torch.distributed.run", *itertools.chain(*options.items()), script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    hosts = [
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(int(options.get("--nnodes", 1)))
    ]
    printed = [host.communicate(timeout=HANGS)[0] for host in hosts]
    assert not any(host.returncode for host in hosts), printed
    return "".join(printed)


def can_run(first):
    """Whether what the first line of a block says it needs is installed. (Blocks for mpirun are run by test_mpi.py.)"""
    needed = re.findall(r"^# needs (\w+)", first) or ["transformers"] * ("hf.py" in first)
    return not first.startswith("# mpirun") and all(importlib.util.find_spec(name) for name in needed)


def check_printed(printed, block):
    if block.expected is not None:
        assert printed == block.expected
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert not losses or losses[-1] < losses[0], printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names, ran = {}, 0
    for block in pages.blocks(page):
        if block.language == "sh":  # other commands are run by the tests of the command line
            for line in pages.commands(block.code):
                if line.startswith(("torchrun ", "python examples/")):
                    check_printed(start_script(line.split(), tmp_path), block)
        if block.language != "python":
            continue
        first = block.code.splitlines()[0]
        if not can_run(first):
            continue
        if first.startswith(("# torchrun", "# python")):
            words = first[2:].split()
            (tmp_path / words[-1]).write_text(block.code)
            check_printed(start_script(words, tmp_path), block)
        else:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("error", ringattn.HolesWarning)  # a page must not show a pattern with holes unawares
                exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
            check_printed(capsys.readouterr().out, block)
        ran += 1
    assert ran


def test_the_training_script_learns_from_a_text_of_ones_own(tmp_path):
    script, text = str(ROOT / "examples" / "python" / "train_characters.py"), tmp_path / "text"
    text.write_text("over and over " * 20)
    losses = tmp_path / "losses"
    printed = run_here(script, ["--text", str(text), "--seq", "64", "--steps", "12", "--losses", str(losses)])
    found = [float(line) for line in losses.read_text().splitlines()]
    assert len(found) == 12 and found[-1] < found[0] and "of 64 characters right" in printed
    with pytest.raises(SystemExit, match="--seq is 1024; the text has 280 characters"):
        run_here(script, ["--text", str(text)])


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    module = importlib.import_module(f"ringattn.{name}")
    result = doctest.testmod(module, verbose=False)
    assert result.attempted > 0 and result.failed == 0


def test_every_public_function_and_class_has_an_example():
    import inspect

    values = [getattr(ringattn, name) for name in ringattn.__all__] + [ringattn.transformers.register]
    values = [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    assert len(values) > 30
    assert not [value.__name__ for value in values if ">>>" not in (value.__doc__ or "")]
    assert not [value.__name__ for value in values if "+SKIP" in value.__doc__]
