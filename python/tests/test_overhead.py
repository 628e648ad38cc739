"""What a call costs beyond its C call, in processor time of the calling thread, so that a busy machine does not matter."""

import os
import time

import numpy as np
import pytest
import ringattn
from ringattn import _devices, _engine
from ringattn._lib import lib

try:
    import torch
except ImportError:
    torch = None

SLACK = 1 if os.environ.get("RINGATTN_LONG") else 3  # neighbours on the machine empty its caches; the long tier has it alone


def microseconds(call, repeats=200, rounds=15):
    """The quickest of some rounds: disturbances only ever add."""
    call()
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(repeats):
            call()
        times.append((time.thread_time_ns() - start) / repeats / 1000)
    return min(times)


def overhead(x, limit, name, record_property):
    def call():
        return ringattn.attention(x, x, x, threads=1)

    whole, kept = microseconds(call), call()
    comm = _engine.alone(_devices.CPU)
    assert comm._plan and kept is not None  # the prepared arguments point to it
    over = whole - microseconds(lambda: lib.ra_forward(comm._plan, comm._address))
    record_property("overhead_us", over)
    print(f"{name}: {over:.1f} us over the C call")
    assert over < limit * SLACK


def test_numpy_costs_less_than_30_us_over_the_c_call(record_property):
    overhead(np.ones((1, 1, 1, 8), np.float32), 30, "NumPy", record_property)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_costs_less_than_100_us_over_the_c_call(requires_grad, record_property):
    name = "torch with autograd" if requires_grad else "torch"
    overhead(torch.ones(1, 1, 1, 8, requires_grad=requires_grad), 100, name, record_property)
