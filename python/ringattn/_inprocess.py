"""``group=p``: p ranks, each a thread of this process; whole tensors in, whole tensors out.

Ctrl-C may raise an exception in the caller's thread at any moment. So that thread is no rank itself and only waits, and an
interrupt ends the ring before it is passed on. The ranks hold what they touch, and communicators are kept for another call only
if every rank has finished: nothing is freed or used again too early, whatever is raised.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from typing import Any, Callable, Optional

import numpy as np

from . import _lib
from ._config import Problem, Shape
from ._engine import Alone, Communicator, Ranges, Tensor, lasting, leave, note, run_on
from ._lib import c_void_p, lib

# Which tensors of a call have the rows of the queries and which those of the keys, and which are results.
_ROWS = {"forward": "qkkqq", "forward_with_gradient": "qkkqq", "backward": "qkkqqqqqkk"}
_RESULTS = {"forward": (3, 4), "forward_with_gradient": (3, 4), "backward": (7, 8, 9)}


class InProcess(Alone):
    """Ranks of contiguous and striped layouts read and write the whole tensors through strided views. A zigzag rank holds two
    runs, which no single stride describes: the caller's library brings the rows into the order of `order` first, and its
    results back.
    """

    def __init__(self, ranks: int):
        self.ranks, self.key = ranks, f"threads:{ranks}"

    def order(self, problem: Problem) -> Optional[tuple[Any, Any]]:
        options = problem.options
        if options.layout != "zigzag" or self.ranks == 1:
            return None
        orders = []
        for part in range(2):
            runs = [
                np.arange(count) * step + start for shard in problem.shards(self.ranks) for start, step, count in shard[part]
            ]
            orders.append(np.concatenate(runs).astype(np.int64))
        if options.query_placement == "replicated":
            orders[0] = np.arange(problem.shape.seq_q)
        return orders[0], orders[1]

    def _rows(self, problem: Problem) -> list[dict[str, tuple[int, int]]]:
        """For each rank (start, step) of its query and key rows in the ordered tensors."""
        options, found, seen = problem.options, [], [0, 0]
        for shard in problem.shards(self.ranks):
            rows = {}
            for part, name in enumerate("qk"):
                count = sum(run[2] for run in shard[part])
                rows[name] = (seen[part], 1) if options.layout == "zigzag" else shard[part][0][:2]
                seen[part] += count
            if options.query_placement == "replicated":
                rows["q"] = (0, 1)
            found.append(rows)
        return found

    def run(
        self,
        call: str,
        problem: Problem,
        seed: int,
        ranges: Ranges,
        stream: int,
        tensors: tuple[Tensor, ...],
        owners: tuple[Any, ...],
    ) -> None:
        size = (4, 2, 2, 8)[problem.shape.dtype]
        lse_size = 8 if size == 8 else 4
        rows, kinds = self._rows(problem), _ROWS[call]
        replicated = problem.options.query_placement == "replicated"
        spare: list[Any] = []  # where all but one of the ranks with replicated queries write their equal results

        def of_rank(rank: int) -> tuple[Tensor, ...]:
            mine = []
            for index, tensor in enumerate(tensors):
                is_lse = index in (4, 6)
                if replicated and rank and kinds[index] == "q" and index in _RESULTS[call] and tensor[0]:
                    mine.append(_spare(problem.shape, size, is_lse, spare))
                else:
                    start, step = rows[rank][kinds[index]]
                    address, batch, row, head = tensor
                    mine.append(
                        (address + start * row * (lse_size if is_lse else size), batch, row * step, head) if address else tensor
                    )
            return tuple(mine)

        parts = [of_rank(rank) for rank in range(self.ranks)]
        choose_device = _device_chooser() if problem.shape.device == _lib.CUDA else None

        def work(rank: int, comm: Communicator) -> None:
            if choose_device:
                choose_device()
            run_on(comm, call, problem, seed, ranges, stream, parts[rank])

        keep = lasting(problem.options)
        comms = _taken(self.ranks) if keep else _new_thread_ranks(self.ranks)
        ring = _Ring(comms, work, (owners, spare))
        ring.run()
        failed = [error for error in ring.errors if error is not None]
        if failed or not keep:
            leave(comms)
        else:
            _keep(comms)
        if failed:
            own = [error for error in failed if getattr(error, "status", "") not in ("RA_ABORTED", "RA_PEER_LOST")]
            raise (own or failed)[0]


def _spare(shape: Shape, size: int, is_lse: bool, kept: list[Any]) -> Tensor:
    rows, heads, dim = shape.seq_q, shape.heads, shape.head_dim
    if is_lse:
        size, dim = max(size, 4), 1
    kept.append(np.empty(shape.batch * rows * heads * dim * size, np.uint8))
    address = kept[-1].ctypes.data
    return (address, heads * rows, 1, rows) if is_lse else (address, rows * heads * dim, heads * dim, dim)


def _device_chooser() -> Callable[[], None]:
    """A function that makes this thread's CUDA device the current one of the thread that calls it."""
    import torch

    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


# ------------------------------------------------------------------------------------------------------------ the communicators

_SETS_KEPT = 4  # a thread


class _Kept(threading.local):
    """Sets of communicators between calls of a thread, by the number of ranks; the oldest first."""

    def __init__(self) -> None:
        self.sets: OrderedDict[int, list[Communicator]] = OrderedDict()


_kept = _Kept()


def _after_fork() -> None:
    """A child makes communicators of its own."""
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_after_fork)


def _new_thread_ranks(ranks: int) -> list[Communicator]:
    handles = (c_void_p * ranks)()
    _lib.check(lib.ra_comm_threads(ranks, handles))
    return [Communicator(handle or 0, ranks) for handle in handles]


def _taken(ranks: int) -> list[Communicator]:
    """Communicators for a call. No other call gets them before `_keep`, so a call that is interrupted leaves none behind."""
    return _kept.sets.pop(ranks, None) or _new_thread_ranks(ranks)


def _keep(comms: list[Communicator]) -> None:
    sets = _kept.sets
    sets[len(comms)] = comms
    note(lambda: [comm.stats() for comm in comms])
    while len(sets) > _SETS_KEPT:
        for comm in sets.popitem(last=False)[1]:
            comm.close()


# ------------------------------------------------------------------------------------------------------------------ the threads


class _Ring:
    """Runs ``work(rank, comm)`` on a thread for each rank. `errors` has what each rank raised; an interrupt of the caller is
    raised by `run` itself, when every rank is out."""

    def __init__(self, comms: list[Communicator], work: Callable[[int, Communicator], None], owners: Any):
        self._comms, self._work, self._owners = comms, work, owners
        self.errors: list[Optional[BaseException]] = [None] * len(comms)
        self._lock = threading.Lock()
        self._begun = self._ended = 0
        self._over = False  # no rank begins any more
        self._out = False  # every rank that began has ended, and no other will begin
        # Held until then. An Event would not do: an interrupt may leave it locked for ever.
        self._inside = threading.Lock()
        self._inside.acquire()

    def run(self) -> None:
        raised: Optional[BaseException] = None
        try:
            for rank in range(len(self._comms)):
                thread = threading.Thread(target=self._rank, args=(rank,), name=f"ringattn rank {rank}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise _lib.RingattnError(
                        f"rank {rank} of {len(self._comms)} has no thread: {error}", "RA_NOMEM"
                    ) from error
            self._wait()
        except BaseException as error:
            raised = error
        while not self._out:
            try:
                self._end(f"the call was interrupted ({type(raised).__name__})")
                self._wait()
            except BaseException as error:  # another Ctrl-C
                raised = raised or error
        if raised is not None:
            leave(self._comms)
            raise raised

    def _rank(self, rank: int) -> None:
        with self._lock:
            if self._over:
                return
            self._begun += 1
        try:
            self._work(rank, self._comms[rank])
        except BaseException as error:
            self.errors[rank] = error
            self._abort(rank, getattr(error, "code", _lib.ABORTED), str(error))
        with self._lock:
            self._ended += 1
            if self._ended == (self._begun if self._over else len(self._comms)):
                self._leave()

    def _wait(self) -> None:
        while not self._out:
            self._inside.acquire()

    def _leave(self) -> None:
        """With the lock held."""
        if not self._out:
            self._out = True
            self._inside.release()

    def _end(self, reason: str) -> None:
        with self._lock:
            self._over = True
            if self._ended == self._begun:
                self._leave()
        for rank in range(len(self._comms)):
            self._abort(rank, _lib.ABORTED, reason)

    def _abort(self, rank: int, status: int, reason: str) -> None:
        lib.ra_comm_abort(self._comms[rank].handle, status, reason.encode())
