"""What a call costs beyond its C call, in processor time of the calling thread, so that a busy machine does not matter."""

import os
import time

import numpy as np
import pytest
import ringattn
from ringattn import _engine
from ringattn._lib import lib

try:
    import torch
except ImportError:
    torch = None

SLACK = float(os.environ.get("RINGATTN_OVERHEAD_SLACK", "1"))


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


def c_call(arguments):
    """The plain C call of the same problem, with its arguments ready."""
    comm = _engine.alone()
    keep = arguments  # the tensors that the prepared arguments point to
    assert keep is not None and comm._plan
    return microseconds(lambda: lib.ra_forward(comm._plan, comm._address))


def test_numpy_costs_less_than_30_us_over_the_c_call(record_property):
    x = np.ones((1, 1, 1, 8), np.float32)
    whole = microseconds(lambda: ringattn.attention(x, x, x, threads=1))
    kept = ringattn.attention(x, x, x, threads=1)
    overhead = whole - c_call(kept)
    record_property("overhead_us", overhead)
    print(f"NumPy: {overhead:.1f} us over the C call")
    assert overhead < 30 * SLACK


@pytest.mark.skipif(torch is None, reason="torch is not installed")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_costs_less_than_100_us_over_the_c_call(requires_grad, record_property):
    x = torch.ones(1, 1, 1, 8, requires_grad=requires_grad)
    whole = microseconds(lambda: ringattn.attention(x, x, x, threads=1))
    kept = ringattn.attention(x, x, x, threads=1)
    overhead = whole - c_call(kept)
    record_property("overhead_us", overhead)
    print(f"torch{' with autograd' if requires_grad else ''}: {overhead:.1f} us over the C call")
    assert overhead < 100 * SLACK
