"""What the tests of a CUDA module share: the module, its device, inputs and bounds. RINGATTN_CUDA_LIBRARY names the module;
RINGATTN_GPU_SMALL=1 leaves out the large cases, for compute-sanitizer. On the stand-in, whose device is the CPU, they are left
out anyway."""

import contextlib
import os
import sys
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("needs PyTorch") from None

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from backend import Backend  # noqa: E402
from definition import attended  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OUT_BOUND = {BF16: 1e-2, F16: 1.4e-3, F32: 2e-6}  # of gradients, too
LSE_BOUND = {BF16: 2e-5, F16: 2e-5, F32: 2e-6}
backend = Backend(os.environ["RINGATTN_CUDA_LIBRARY"])
DEVICE, HOPPER = backend.device, backend.hopper
SMALL = bool(os.environ.get("RINGATTN_GPU_SMALL")) or DEVICE == "cpu"


def draw(b, n, h, d, dtype, spread=1.0):
    return (torch.randn(b, n, h, d, device=DEVICE) * spread).to(dtype)


def met(desc, b, nq, nk, h, hk):
    """[B, Hk, Nq, Nk] bool: pairs that some branch attends to."""
    seen = torch.zeros(b, hk, nq, nk, dtype=torch.bool, device=DEVICE)
    for bi in range(b):
        for g in range(hk):
            for i in range(len(desc.branches)):
                seen[bi, g] |= attended(desc, i, g, hk, bi, nq, nk, range(nq), DEVICE)
    return seen


def unread(desc, b, nq, nk, h, hk):
    """[B, Nk, Hk] bool: keys that no query attends to."""
    return ~met(desc, b, nq, nk, h, hk).any(2).transpose(1, 2)


def keyless(desc, b, nq, nk, h, hk):
    """[B, Nq, H] bool: query rows without keys."""
    return ~met(desc, b, nq, nk, h, hk).any(3).transpose(1, 2).repeat_interleave(h // hk, 2)


@contextlib.contextmanager
def kernel(wanted):
    backend.wanted = wanted
    try:
        yield
    finally:
        backend.wanted = None
