"""What the tests share. Parts that need torch, transformers or matplotlib are skipped without them, with a count at the end;
where CI is set a skip for want of torch is a failure."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
CI = os.environ.get("CI", "").lower() in ("true", "1")
sys.path.insert(0, str(HERE))

try:
    import torch  # noqa: F401
except ImportError:
    torch = None

NEED_TORCH = [
    "test_torch.py",
    "test_comparison.py",
    "test_transforms.py",
    "test_compile.py",
    "test_modules.py",
    "test_multihead.py",
    "test_porting.py",
    "test_helpers.py",
    "test_sharding.py",
    "test_custom.py",
    "test_cache.py",
    "test_distributed.py",
    "test_transformers.py",
    "test_tutorial.py",
]
collect_ignore = [] if torch is not None else NEED_TORCH


def pytest_terminal_summary(terminalreporter):
    if torch is None:
        terminalreporter.write_line(f"left out: {len(NEED_TORCH)} files of tests that need torch, which is not installed")


def pytest_sessionfinish(session, exitstatus):
    if torch is None and CI and exitstatus == 0:
        session.exitstatus = 1
        print("torch is not installed, and CI is set: what is left out counts as failed", file=sys.stderr)


@pytest.fixture(autouse=True)
def fresh_warnings():
    """Each test meets the warning about holes as if for the first time."""
    from ringattn import _config

    _config._warned.clear()
    for options in _config._options.values():
        options.problems.clear()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


class Foreign:
    """An array of a library that is known by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


HANGS = 600  # seconds after which a process counts as hanging: far beyond what a busy machine takes


def run_python(code, *, ranks=None, check=True, arguments=(), cwd=None):
    """Runs a script in fresh processes: one, or `ranks` of them under torchrun. Returns the finished process."""
    command = [sys.executable]
    if ranks is not None:
        command += [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
    path = pathlib.Path(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [*command, str(path), *map(str, arguments)], capture_output=True, text=True, timeout=HANGS, env=environment, cwd=cwd
    )
    if check and done.returncode:
        raise AssertionError(f"{path.name} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}")
    return done
