"""Rings over mpi4py communicators, under mpirun."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
MPIRUN = shutil.which("mpirun") or shutil.which("mpiexec")
pytestmark = pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun here")

try:
    import torch  # noqa: F401

    TORCH = ["torch"]
except ImportError:
    TORCH = []


@pytest.mark.parametrize("ranks, what", [(2, TORCH), (3, [])])
def test_a_ring_over_mpi_equals_one_rank(ranks, what):
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
    options = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version or "OpenRTE" in version else []
    worker = pathlib.Path(__file__).parent / "workers" / "mpi_checks.py"
    done = subprocess.run(
        [MPIRUN, *options, "-n", str(ranks), sys.executable, str(worker), *what],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.count(" ok") == ranks
