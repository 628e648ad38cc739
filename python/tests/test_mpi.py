"""Rings over mpi4py communicators, under mpirun."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import HANGS

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))
import pages  # noqa: E402

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
if asked.returncode:
    pytest.skip(f"mpi4py finds no MPI: {asked.stderr.strip().splitlines()[-1]}", allow_module_level=True)
VENDOR = asked.stdout.strip()
LAUNCHERS = {"Open MPI": ("mpirun.openmpi", "mpirun"), "MPICH": ("mpirun.mpich", "mpiexec.hydra", "mpirun")}
MPIRUN = next(filter(None, map(shutil.which, LAUNCHERS.get(VENDOR, ("mpiexec",)))), None)
pytestmark = pytest.mark.skipif(MPIRUN is None, reason=f"mpi4py is built for {VENDOR}, and there is no launcher of it")

try:
    import torch  # noqa: F401

    TORCH = ["torch"]
except ImportError:
    TORCH = []


def mpirun(ranks, *command):
    """What a script prints under mpirun."""
    options = ["--oversubscribe", "--allow-run-as-root"] if VENDOR == "Open MPI" else []
    done = subprocess.run(
        [MPIRUN, *options, "-n", str(ranks), sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.mark.parametrize("ranks, what", [(2, TORCH), (3, [])])
def test_a_ring_over_mpi_equals_one_rank(ranks, what):
    printed = mpirun(ranks, pathlib.Path(__file__).parent / "workers" / "mpi_checks.py", *what)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} ok\n" in printed, printed


def test_the_scripts_of_the_pages_print_what_they_say(tmp_path):
    found = [block for page in pages.PAGES for block in pages.blocks(page) if block.code.startswith("# mpirun -n")]
    assert found
    for block in found:
        (tmp_path / "script.py").write_text(block.code)
        assert mpirun(block.code.split()[3], tmp_path / "script.py") == block.expected
