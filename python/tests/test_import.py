"""The package stands on NumPy alone; everything else is asked for when it is used."""

import os
import pathlib
import subprocess
import sys

import pytest
import ringattn
from conftest import HANGS

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def run(code, block=("torch", "mpi4py", "transformers", "matplotlib", "ml_dtypes")):
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=set(block)) + code], capture_output=True, text=True, timeout=HANGS
    )


def test_import_and_attention_work_without_torch_and_mpi():
    done = run("""
import numpy as np, ringattn
x = np.ones((1, 8, 2, 4), np.float32)
assert np.allclose(ringattn.attention(x, x, x, is_causal=True, group=2), 1)
assert ringattn.stats() and ringattn.info() and ringattn.describe(seq=8, heads=2, head_dim=4)
assert not {"torch", "mpi4py"} & set(sys.modules)
""")
    assert done.returncode == 0, done.stderr


def test_names_that_need_torch_say_so():
    done = run("""
import ringattn
for name in ("RingDilatedAttention", "RingMultiheadDilatedAttention", "sync_gradients", "check", "split_by_rank"):
    try:
        getattr(ringattn, name)
    except ImportError as error:
        assert name in str(error) and "PyTorch" in str(error), error
    else:
        raise SystemExit(name)
try:
    ringattn.draw()
except ImportError as error:
    assert "matplotlib" in str(error)
""")
    assert done.returncode == 0, done.stderr


def test_import_is_quick_and_does_not_load_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, ringattn; assert 'torch' not in sys.modules"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_torch_is_used_without_loading_its_compiler():
    pytest.importorskip("torch", reason="torch is not installed")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import sys, torch, ringattn
x = torch.ones(1, 4, 2, 4, requires_grad=True)
ringattn.attention(x, x, x).sum().backward()
module = ringattn.RingMultiheadDilatedAttention(8, 2)
module(torch.ones(1, 4, 8), key_padding_mask=torch.zeros(1, 4, dtype=torch.bool))[0].sum().backward()
assert "torch._dynamo" not in sys.modules
""",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_documented_and_unknown_ones_raise():
    for name in ringattn.__all__:
        try:
            value = getattr(ringattn, name)
        except ImportError:
            continue  # needs torch
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no_such_name"):
        ringattn.no_such_name  # noqa: B018


def test_a_missing_library_is_an_import_error_that_names_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import ringattn"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "RINGATTN_LIBRARY": str(tmp_path / "nothing.so"),
            "PYTHONPATH": str(pathlib.Path(ringattn.__file__).parents[1]),
        },
    )
    assert done.returncode != 0 and "ImportError" in done.stderr and "nothing.so" in done.stderr


@pytest.mark.skipif(not os.environ.get("RINGATTN_LONG"), reason="the type checker takes a minute: RINGATTN_LONG=1 runs it")
def test_the_types_of_the_package_are_checked_strictly():
    pytest.importorskip("mypy", reason="mypy is not installed")
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_package_is_typed_and_its_version_is_the_librarys():
    assert (pathlib.Path(ringattn.__file__).parent / "py.typed").exists()
    assert ringattn.__version__ == ringattn.info()["version"]
