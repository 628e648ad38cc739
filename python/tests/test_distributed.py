"""Rings of processes under torchrun, over gloo: each check of workers/*_checks.py on 2 and on 4 ranks."""

import json
import os
import pathlib
import sys

import pytest
import torch.distributed
from conftest import run_python

WORKERS = pathlib.Path(__file__).parent / "workers"
LONG = bool(os.environ.get("RINGATTN_LONG"))
sys.path[:0] = [str(WORKERS), str(pathlib.Path(__file__).parents[2] / "tests")]
import common  # noqa: E402
import patience  # noqa: E402
import ring_checks  # noqa: E402, F401

if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "results.json"
    done = run_python(WORKERS / "ring_checks.py", ranks=request.param, arguments=[path], check=False)
    found = json.loads(path.read_text()) if path.exists() else {}
    return found, done


@pytest.mark.parametrize("name", common.names())
def test_on_a_group_of_processes(results, name):
    found, done = results
    assert name in found, f"the ranks did not come this far\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert found[name] == "ok", found[name]


def test_all_ranks_leave_in_order(results):
    _, done = results
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert "terminate called" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr[-4000:]


def test_a_rank_that_exits_gives_an_exception_on_the_others(tmp_path):
    done = run_python(WORKERS / "dying_rank.py", arguments=[tmp_path])
    for rank in (0, 1):
        path = tmp_path / f"{rank}.json"
        assert path.exists(), f"rank {rank} left nothing\n{done.stderr[-4000:]}"
        found = json.loads(path.read_text())
        assert found is not None, f"rank {rank} saw no exception"
        assert found["status"] in ("RA_PEER_LOST", "RA_TIMEOUT"), found
        assert "rank 2" in found["message"], found
        assert found["seconds"] < 60, found  # silence of 6 seconds is enough; the rest is for a busy machine
        assert "again" in found, "a broken group must stay broken"


def test_every_rank_killed_or_stopped_at_every_step(tmp_path):
    def judge(job, folder, done):
        for rank in set(range(job["ranks"])) - {job["victim"]}:
            path = folder / f"{rank}.json"
            assert path.exists(), f"{job}: rank {rank} hangs\n{done.stderr[-4000:]}"
            found = json.loads(path.read_text())
            assert found is not None, f"{job}: rank {rank} saw no exception"
            assert found["status"] in ("RA_PEER_LOST", "RA_TIMEOUT"), (job, rank, found)
            assert f"rank {job['victim']}" in found["message"], (job, rank, found)
            limit = (2.5 if LONG else 10) * patience.factor()  # a busy machine takes its time
            assert found["seconds"] < limit, (job, rank, found)

    def trial():
        folder = tmp_path / f"{patience.factor():g}"
        folder.mkdir()
        done = run_python(WORKERS / "killed_rank.py", arguments=[folder, patience.factor()] + ["long"] * LONG)
        for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
            judge(job, folder / str(number), done)

    patience.repeat(trial, timeout=1.5)


def test_a_rank_whose_python_is_busy_is_waited_for():
    """A thread that holds Python's lock for longer than the timeout keeps its rank from beating, not from living."""

    def trial():
        done = run_python(WORKERS / "busy_rank.py", arguments=[2 * patience.factor()])
        assert "rank 0: right" in done.stdout and "rank 1: right" in done.stdout, f"{done.stdout}\n{done.stderr[-4000:]}"

    patience.repeat(trial, timeout=2.0)
