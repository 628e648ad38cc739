"""Running a problem on a communicator.

A tensor is a tuple ``(address, batch stride, row stride, head stride)`` here, strides in elements; ``NOTHING`` is no tensor.
What the caller's library allocates, the caller's library frees.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from ctypes import c_void_p
from typing import Any, Callable, Optional

from . import _lib
from ._config import Options, Problem, Shape, problem_for
from ._devices import Device
from ._lib import Desc, Stats, lib

Tensor = tuple[int, int, int, int]
Ranges = Optional[tuple[tuple[int, ...], tuple[int, ...]]]  # first and past-the-last key of each batch entry
NOTHING: Tensor = (0, 0, 0, 0)

_FORWARD = struct.Struct("=" + "Qqqq" * 5 + "Q")
_BACKWARD = struct.Struct("=" + "Qqqq" * 10 + "Q")
_START_TIMEOUT = 600.0
_TIMEOUT = 60.0


class Communicator:
    """One ``ra_comm``, with the plan of its latest call kept for the next one like it."""

    def __init__(self, handle: int, ranks: int = 1, transport: Any = None):
        self.handle, self.ranks = handle, ranks
        self.lock = threading.Lock()  # a handle serves one thread at a time; CUDA's backward pass comes from another one
        self._transport = transport  # kept alive for as long as the library may call it
        self._pid = os.getpid()  # a forked child does not free the handle: its threads exist in the parent only
        self._timeouts = (0.0, 0.0)
        self._plan = 0
        self._plan_key: Any = None
        self._reused = 0  # passes that reused the plan kept here, which the library's cache does not count
        self._arguments = ctypes.create_string_buffer(max(_FORWARD.size, _BACKWARD.size))
        self._address = ctypes.addressof(self._arguments)

    def plan(self, problem: Problem, seed: int, ranges: Ranges, key: Any) -> int:
        """The plan of ``key``, which is (problem, seed, ranges)."""
        if self._plan and key == self._plan_key:
            self._reused += 1
            return self._plan
        self._drop_plan()
        self.set_timeouts(problem.options)
        desc = problem.desc
        if seed or ranges is not None:
            desc = Desc.from_buffer_copy(desc)
            desc.seed = seed
            if ranges is not None:
                begin, end = ranges
                desc.key_begin = _lib.int64_array("key_range", begin)
                desc.key_end = _lib.int64_array("key_range", end)
        plan = c_void_p()
        status = lib.ra_plan_create(self.handle, desc, ctypes.byref(plan))
        if status:
            self.fail(status)
        self._plan, self._plan_key = plan.value or 0, key
        return self._plan

    def forget(self) -> None:
        """The next call plans anew."""
        with self.lock:
            self._drop_plan()

    def _drop_plan(self) -> None:
        plan, self._plan, self._plan_key = self._plan, 0, None
        if plan:
            lib.ra_plan_destroy(plan)

    def set_timeouts(self, options: Options) -> None:
        timeout, call_timeout = options.timeout or _TIMEOUT, options.call_timeout or 0.0
        if (timeout, call_timeout) != self._timeouts:
            _lib.check(lib.ra_comm_set_timeout(self.handle, timeout, max(_START_TIMEOUT, timeout)))
            _lib.check(lib.ra_comm_set_call_timeout(self.handle, call_timeout))
            self._timeouts = (timeout, call_timeout)
            if self._transport is not None:
                self._transport.timeout = timeout

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, in rank order; all have the same length."""
        size = len(record)
        with self.lock:
            everyone = ctypes.create_string_buffer(size * self.ranks)
            status = lib.ra_comm_allgather(self.handle, record, everyone, size)
        if status:
            self.fail(status)
        return [everyone.raw[size * rank : size * (rank + 1)] for rank in range(self.ranks)]

    def forward(
        self,
        problem: Problem,
        seed: int,
        ranges: Ranges,
        key: Any,
        stream: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        plan = self.plan(problem, seed, ranges, key)
        _FORWARD.pack_into(self._arguments, 0, *q, *k, *v, *out, *lse, stream)
        status = lib.ra_forward(plan, self._address)
        if status:
            self.fail(status)

    def forward_with_gradient(
        self, problem: Problem, seed: int, ranges: Ranges, key: Any, stream: int, *tensors: Tensor
    ) -> None:
        """forward, unless backward could not run: then nothing runs."""
        status = lib.ra_plan_check_backward(self.plan(problem, seed, ranges, key))
        if status:
            self.fail(status)
        self.forward(problem, seed, ranges, key, stream, *tensors)

    def backward(self, problem: Problem, seed: int, ranges: Ranges, key: Any, stream: int, *tensors: Tensor) -> None:
        """tensors: q, k, v, out, lse, dout, dlse, dq, dk, dv."""
        plan = self.plan(problem, seed, ranges, key)
        _BACKWARD.pack_into(self._arguments, 0, *[number for tensor in tensors for number in tensor], stream)
        status = lib.ra_backward(plan, self._address)
        if status:
            self.fail(status)

    def fail(self, status: int) -> None:
        if not self.handle:
            raise _lib.RingattnError("the group is closed: it was freed or destroyed, or dist.close() was called", "RA_ABORTED")
        detail = getattr(self._transport, "reason", "")
        _lib.fail(status, detail() if callable(detail) else "")

    def stats(self) -> dict[str, Any]:
        found = Stats(struct_size=ctypes.sizeof(Stats))
        result: dict[str, Any] = {}
        if self._plan:
            _lib.check(lib.ra_stats(self._plan, found))
            result = {
                "kernel": lib.ra_plan_kernel(self._plan).decode(),
                "schedule": _lib.SCHEDULE_NAMES[lib.ra_plan_schedule(self._plan)],
                "bucket": lib.ra_plan_bucket(self._plan),
                "reason": lib.ra_plan_reason(self._plan).decode(),
                "workspace_bytes": lib.ra_plan_workspace(self._plan, False),
                "workspace_bytes_backward": lib.ra_plan_workspace(self._plan, True),
            }
        else:
            _lib.check(lib.ra_comm_stats(self.handle, found))
        result.update({field[0]: getattr(found, field[0]) for field in Stats._fields_ if field[0] != "struct_size"})
        result["cache_hits"] += self._reused
        return result

    def stats_list(self) -> list[dict[str, Any]]:
        return [self.stats()]

    def report(self) -> str:
        if not self._plan:
            return ""
        length = lib.ra_plan_report(self._plan, None, 0)
        text = ctypes.create_string_buffer(length + 1)
        lib.ra_plan_report(self._plan, text, length + 1)
        return text.value.decode()

    def close(self) -> None:
        """Frees the communicator. Never waits for peers."""
        with self.lock:
            self._drop_plan()
            handle, self.handle = self.handle, 0
            if handle:
                lib.ra_comm_destroy(handle)

    def __del__(self) -> None:
        try:
            if self.handle and os.getpid() == self._pid:
                self.close()
        except Exception:  # the interpreter is going down and modules are half gone
            pass


def self_communicator() -> Communicator:
    handle = c_void_p()
    _lib.check(lib.ra_comm_self(ctypes.byref(handle)))
    return Communicator(handle.value or 0)


# ------------------------------------------------------------------------------------------------------------ this thread's own


class _Local(threading.local):
    """Communicators belong to the thread that made them: the library's handles serve one thread at a time."""

    def __init__(self) -> None:
        self.alone: dict[Device, Communicator] = {}  # each keeps workspaces on its device
        self.latest: Callable[[], list[dict[str, Any]]] = list


_local = _Local()


def _after_fork() -> None:
    """A child makes communicators of its own."""
    global _local
    _local = _Local()


os.register_at_fork(after_in_child=_after_fork)


def alone(device: Device) -> Communicator:
    """This thread's communicator of one rank, for calls on a device."""
    found = _local.alone.get(device)
    if found is None:
        found = _local.alone[device] = self_communicator()
    return found


def note(latest: Callable[[], list[dict[str, Any]]]) -> None:
    """Remembers what ``stats`` should say about this thread's latest call."""
    _local.latest = latest


def stats() -> dict[str, Any]:
    """Numbers of this thread's latest call, and of the buffers and plans kept for the next one.

    ``steps``, ``bytes_sent``, ``bytes_received``, ``compute_seconds`` and ``wait_seconds`` are those of the latest forward or
    backward pass on this rank; ``pool_*`` and ``cache_*`` count since the communicator was made, ``cache_hits`` every pass
    whose plan was made before. With in-process ranks the list ``ranks`` holds one such dictionary each, and the values beside
    it are their sums (for seconds: the largest).

    >>> import numpy as np, ringattn
    >>> x = np.ones((1, 8, 2, 4), np.float32)
    >>> out = ringattn.attention(x, x, x)
    >>> ringattn.stats()["bytes_sent"]
    0
    """
    every = _local.latest()
    if len(every) < 2:
        return every[0] if every else {}
    result = dict(every[0])
    for name, value in result.items():
        if name.endswith("_seconds"):
            result[name] = max(one[name] for one in every)
        elif isinstance(value, int) and name not in ("bucket", "steps"):
            result[name] = sum(one[name] for one in every)
    result["ranks"] = every
    return result


# ---------------------------------------------------------------------------------------------------------------------- running


def lasting(options: Options) -> bool:
    """Whether buffers and plans of a call serve the next one."""
    return options.enable_memory_pool and options.use_pattern_cache


def run_on(
    comm: Communicator, call: str, problem: Problem, seed: int, ranges: Ranges, stream: int, tensors: tuple[Tensor, ...]
) -> None:
    with comm.lock:
        getattr(comm, call)(problem, seed, ranges, (problem, seed, ranges), stream, *tensors)
    note(comm.stats_list)


class Alone:
    """``group=None``: this process alone."""

    key, ranks, rank = "", 1, 0

    def accept(self, device: Device) -> None:
        """Raises, before anything is touched, if no call can run on the device now."""
        if self.ranks > 1 and device.is_recording():
            raise _lib.RingattnError(
                "a call of several ranks cannot be captured into a CUDA graph: they meet while it is made", "RA_NOT_AVAILABLE"
            )

    def agree(self, options: Options, shape: Shape, seed: int, ranges: Ranges) -> tuple[Problem, int]:
        return problem_for(options, shape), seed

    def refuse(self, reason: str) -> None:
        """Tells the other ranks that this one does not take part in the call."""

    def order(self, problem: Problem) -> Optional[tuple[Any, Any]]:
        """The order in which query and key rows must lie; None for that of the caller."""
        return None

    def run(
        self,
        call: str,
        problem: Problem,
        seed: int,
        ranges: Ranges,
        device: Device,
        tensors: tuple[Tensor, ...],
        owners: tuple[Any, ...],
    ) -> None:
        """Runs `call` on `device`, which is current. `owners` are the arrays that own the memory of `tensors`."""
        if lasting(problem.options):
            run_on(alone(device), call, problem, seed, ranges, device.stream(), tensors)
        else:  # nothing of an earlier call serves this one
            comm = self_communicator()
            run_on(comm, call, problem, seed, ranges, device.stream(), tensors)
            leave([comm])


def leave(comms: list[Communicator]) -> None:
    """Frees communicators that serve one call only; what they counted stays for ``stats``."""
    counted = [comm.stats() for comm in comms]
    note(lambda: counted)
    for comm in comms:
        comm.close()
