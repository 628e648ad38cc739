"""The code of docs/python.md and of the docstrings runs as it stands."""

import doctest
import importlib
import pathlib
import re
import warnings

import pytest
import ringattn
import ringattn.transformers
import torch
from conftest import run_python

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python.md"
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


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_runs_from_top_to_bottom():
    names = {}
    ran = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", ringattn.HolesWarning)  # the page must not show a pattern with holes unawares
        for block in blocks():
            if block.startswith("# torchrun"):
                continue
            if block.startswith("# needs transformers"):
                try:
                    import transformers  # noqa: F401
                except ImportError:
                    continue
            torch.manual_seed(0)
            exec(compile(block, str(PAGE), "exec"), names)
            ran += 1
    assert ran >= 9


@pytest.mark.parametrize("name", ["train.py", "hf.py"])
def test_the_training_scripts_run_on_as_many_ranks_as_they_say(tmp_path, name):
    if name == "hf.py":
        pytest.importorskip("transformers", reason="transformers is not installed")
    (script,) = [block for block in blocks() if block.startswith("# torchrun") and name in block.splitlines()[0]]
    path = tmp_path / name
    path.write_text(script)
    done = run_python(WORKERS / "forks.py", arguments=[script.split()[3], path])
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3 and losses[2] < losses[0], done.stdout


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
