"""Where the tests of the Python package compute: on a GPU, or where torch sees none on the stand-in for one, whose memory is
the CPU's. There every call with a CPU tensor goes to the stand-in, on a stream of its own.

    RINGATTN_LIBRARY   the library; RINGATTN_MODULE_PATH names the stand-in's folder"""

import contextlib
import ctypes
import threading
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("needs PyTorch") from None

from ringattn import _devices, _lib

library = ctypes.CDLL(_lib.lib._name)  # what the package itself does not declare


class StandIn(_devices.Device):
    """torch's own functions compute on the CPU and know nothing of streams: what a call enqueued is waited for when it returns,
    unless `waits` is off. Only the current stream is: a rank's work that does not end there is missing."""

    kind, name = _lib.CUDA, "the stand-in"

    def __init__(self):
        self.waits, self.records, self._stream, self._kept = True, False, ctypes.c_void_p(), []
        _lib.check(_lib.lib.ra_cuda_open_stream(ctypes.byref(self._stream)))

    @contextlib.contextmanager
    def current(self):
        yield
        if self.waits and not threading.current_thread().name.startswith("ringattn rank"):
            self.synchronize()

    def stream(self):
        return self._stream.value

    def is_recording(self):
        return self.records

    def another(self, result):
        made = super().another(result)
        self._kept.append(made)  # torch's allocator of the CPU gives memory to others at once
        return made

    def synchronize(self):
        _lib.check(library.ra_cuda_synchronize(self._stream))
        self._kept.clear()


GPU = torch.cuda.is_available()
PLACE = torch.device("cuda", 0) if GPU else torch.device("cpu")
if not GPU:
    try:
        stand_in = StandIn()
    except _lib.RingattnError as error:
        raise unittest.SkipTest(f"there is no GPU, and no stand-in for one: {error}") from None
    _devices.known[PLACE] = stand_in
else:
    stand_in = None


@contextlib.contextmanager
def on_the_cpu():
    """Calls on CPU tensors run on the CPU, on the stand-in's machine too."""
    kept = _devices.known.get(torch.device("cpu"))
    _devices.known[torch.device("cpu")] = _devices.CPU
    try:
        yield
    finally:
        if kept is not None:
            _devices.known[torch.device("cpu")] = kept


def synchronize():
    torch.cuda.synchronize() if GPU else stand_in.synchronize()
