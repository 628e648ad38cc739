"""Where the tensors of a call lie: all that a call needs to know of a GPU. No other file asks torch about one.

What a call does on a GPU is enqueued on torch's current stream, and its results are there in the order of that stream, as those
of torch's own functions are. So torch's allocator may use memory again as soon as a tensor is gone, and nobody waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import c_void_p
from typing import Any, Optional

import numpy as np

from . import _lib
from ._lib import lib


class Device:
    """The CPU: what a call does is done when it returns."""

    kind, name = _lib.CPU, "cpu"

    def current(self) -> Any:
        """Inside of ``with`` this device is the calling thread's current one."""
        return contextlib.nullcontext()

    def stream(self) -> int:
        """The stream on which a call of this thread is to run."""
        return 0

    def is_recording(self) -> bool:
        """Whether that stream is being captured into a graph."""
        return False

    def another(self, result: Any) -> tuple[int, Any]:
        """Memory like that of a result, which is contiguous: its address and its owner, which may go when the caller's stream
        was given all that uses it."""
        if isinstance(result, np.ndarray):
            made = np.empty_like(result)
            return made.ctypes.data, made
        made = result.new_empty(result.shape)
        return made.data_ptr(), made


class Gpu(Device):
    """A CUDA device of torch."""

    kind = _lib.CUDA

    def __init__(self, index: int):
        import torch

        self._cuda, self._index, self.name = torch.cuda, index, f"cuda:{index}"

    def current(self) -> Any:
        return self._cuda.device(self._index)

    def stream(self) -> int:
        handle: int = self._cuda.current_stream(self._index).cuda_stream
        return handle

    def is_recording(self) -> bool:
        return self._cuda.is_current_stream_capturing()


CPU = Device()
known: dict[Any, Device] = {}  # by torch.device


def device_of(place: Any) -> Optional[Device]:
    """The device of a ``torch.device``; None where it is neither a CPU nor a GPU that CUDA knows."""
    found = known.get(place)
    if found is None and place.type in ("cpu", "cuda"):
        found = known[place] = CPU if place.type == "cpu" else Gpu(place.index)
    return found


class Streams:
    """A stream for each of several ranks of this process, on the current GPU; the library wants them apart.

        caller    ... | fork                        join | ...
        rank 0            `---- steps, copies ----- |
        rank 1            `---- steps, copies ----- |

    What the ranks do comes after all that the caller's stream was given before, and before all that it is given later. So
    memory that belongs to the caller's stream may be used by the ranks without telling torch's allocator of their streams.
    """

    def __init__(self, count: int):
        self._pid = os.getpid()  # what is enqueued runs in this process; a forked child has but the handles
        self._handles: list[c_void_p] = []
        self._events = [c_void_p() for _ in range(count + 1)]  # what a rank has done, and what the caller had done before
        for _ in range(count):
            handle = c_void_p()
            _lib.check(lib.ra_cuda_open_stream(ctypes.byref(handle)))
            self._handles.append(handle)

    def of(self, rank: int) -> int:
        return self._handles[rank].value or 0

    def fork(self, stream: int) -> None:
        before = self._events[-1]
        _lib.check(lib.ra_cuda_mark(stream, ctypes.byref(before)))
        for handle in self._handles:
            _lib.check(lib.ra_cuda_wait(handle, before))

    def join(self, stream: int) -> int:
        """Returns a status: there may be an exception already that says more."""
        for handle, done in zip(self._handles, self._events):
            status: int = lib.ra_cuda_mark(handle, ctypes.byref(done)) or lib.ra_cuda_wait(stream, done)
            if status:
                return status
        return _lib.OK

    def close(self) -> None:
        """What is enqueued still runs."""
        handles, self._handles = self._handles, []
        events, self._events = self._events, []
        for event in events:
            lib.ra_cuda_forget(event)
        for handle in handles:
            lib.ra_cuda_close_stream(handle)

    def __del__(self) -> None:
        try:
            if os.getpid() == self._pid:
                self.close()
        except Exception:  # the interpreter is going down and modules are half gone
            pass
