"""Calls on in-process ranks that are torn apart: nothing is freed while a rank writes, and the next call works."""

import pathlib
import threading
import time

import numpy as np
import pytest
import ringattn
from conftest import run_python

X = np.ones((1, 12, 2, 4), np.float32)


def test_ctrl_c_ends_the_ring_before_it_raises():
    run_python(pathlib.Path(__file__).parent / "workers" / "interrupts.py")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_gets_no_thread_is_named_and_the_next_call_works(monkeypatch, rank):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == f"ringattn rank {rank}":
            raise RuntimeError("can't start new thread")
        start(thread)

    ringattn.attention(X, X, X, group=4)  # its communicators are kept
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=f"rank {rank} of 4 has no thread: can't start new thread") as caught:
            ringattn.attention(X, X, X, group=4)
        assert caught.value.status == "RA_NOMEM" and time.monotonic() - began < 30
    assert np.array_equal(ringattn.attention(X, X, X, group=4), X)
