"""``group=p``: p ranks, each a thread of this process; whole tensors in, whole tensors out.

Ctrl-C may raise an exception in the caller's thread at any moment. So that thread is no rank itself and only waits, and an
interrupt ends the ring before it is passed on. The ranks hold what they touch, and communicators are kept for another call only
if every rank has finished: nothing is freed or used again too early, whatever is raised.

All ranks are on the device of the tensors. On a GPU each has a stream of its own, which begins and ends at the caller's.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from ctypes import c_void_p
from typing import Any, Callable, NamedTuple, Optional

from . import _lib
from ._config import Problem
from ._devices import CPU, Device, Streams
from ._engine import Alone, Communicator, Ranges, Tensor, lasting, leave, note, run_on
from ._lib import lib

# Which tensors of a call have the rows of the queries and which those of the keys, and which are results.
_ROWS = {"forward": "qkkqq", "forward_with_gradient": "qkkqq", "backward": "qkkqqqqqkk"}
_RESULTS = {"forward": (3, 4), "forward_with_gradient": (3, 4), "backward": (7, 8, 9)}


class Order(NamedTuple):
    """How rows are brought into another order, and back: runs (start, step, count) of the rows to take."""

    there: list[tuple[int, int, int]]
    back: list[tuple[int, int, int]]


class InProcess(Alone):
    """Ranks of contiguous and striped layouts read and write the whole tensors through strided views. A zigzag rank holds two
    runs, which no single stride describes: the caller's library brings the rows into the order of `order` first, and its
    results back.
    """

    def __init__(self, ranks: int):
        self.ranks, self.key = ranks, f"threads:{ranks}"

    def order(self, problem: Problem) -> Optional[tuple[Order, Order]]:
        options = problem.options
        if options.layout != "zigzag" or self.ranks == 1:
            return None
        shards = problem.shards(self.ranks)
        of_queries, of_keys = ([run for shard in shards for run in shard[part] if run[2]] for part in range(2))
        if options.query_placement == "replicated":
            of_queries = [(0, 1, problem.shape.seq_q)]
        return _order(of_queries), _order(of_keys)

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
        device: Device,
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
                    address, made = device.another(owners[index])
                    spare.append(made)
                    mine.append((address, *tensor[1:]))
                else:
                    start, step = rows[rank][kinds[index]]
                    address, batch, row, head = tensor
                    mine.append(
                        (address + start * row * (lse_size if is_lse else size), batch, row * step, head) if address else tensor
                    )
            return tuple(mine)

        parts = [of_rank(rank) for rank in range(self.ranks)]
        keep = lasting(problem.options)
        ranks = _taken(self.ranks, device) if keep else _Ranks(self.ranks, device)

        def work(rank: int, comm: Communicator) -> None:
            with device.current():
                run_on(comm, call, problem, seed, ranges, ranks.stream(rank), parts[rank])

        ring = _Ring(ranks.comms, work, (owners, spare))
        joined = ranks.run(ring, device)
        failed = [error for error in ring.errors if error is not None]
        if failed or joined or not keep:
            leave(ranks.comms)
        else:
            _keep(ranks, device)
        if failed:
            own = [error for error in failed if getattr(error, "status", "") not in ("RA_ABORTED", "RA_PEER_LOST")]
            raise (own or failed)[0]
        _lib.check(joined)


def _order(runs: list[tuple[int, int, int]]) -> Order:
    """Of runs without gaps that cover all rows."""
    begins, seen = [], 0
    for start, _, count in runs:
        begins.append((start, seen, count))
        seen += count
    return Order(runs, [(begin, 1, count) for _, begin, count in sorted(begins)])


# ------------------------------------------------------------------------------------------------------------ the communicators

_SETS_KEPT = 4  # a thread, or a GPU


class _Ranks:
    """The communicators of several ranks, and on a GPU their streams, which own the communicators' workspaces."""

    def __init__(self, count: int, device: Device):
        self._streams = None if device is CPU else Streams(count)
        handles = (c_void_p * count)()
        _lib.check(lib.ra_comm_threads(count, handles))
        self.comms = [Communicator(handle or 0, count) for handle in handles]

    def stream(self, rank: int) -> int:
        return 0 if self._streams is None else self._streams.of(rank)

    def run(self, ring: _Ring, device: Device) -> int:
        """Runs the ranks, in order with the caller's stream whatever they raise. Returns a status of that order."""
        if self._streams is None:
            ring.run()
            return _lib.OK
        stream = device.stream()
        self._streams.fork(stream)
        try:
            ring.run()
        finally:
            status = self._streams.join(stream)
        return status

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
        if self._streams is not None:
            self._streams.close()


_Sets = OrderedDict[int, _Ranks]  # by the number of ranks; the oldest first


class _Kept(threading.local):
    """Ranks between calls of a thread."""

    def __init__(self) -> None:
        self.sets = _Sets()


_kept = _Kept()
# Ranks between calls on a GPU, of any thread: torch calls backward from another one than forward, and a set for each would
# take the memory of both passes instead of that of the larger.
_kept_on: dict[Device, _Sets] = {}


def _after_fork() -> None:
    """A child makes communicators of its own."""
    global _kept, _kept_on
    _kept, _kept_on = _Kept(), {}


os.register_at_fork(after_in_child=_after_fork)


def _sets(device: Device) -> _Sets:
    return _kept.sets if device is CPU else _kept_on.setdefault(device, _Sets())


def _taken(count: int, device: Device) -> _Ranks:
    """Ranks for a call. No other call gets them before `_keep`, so a call that is interrupted leaves none behind."""
    return _sets(device).pop(count, None) or _Ranks(count, device)


def _keep(ranks: _Ranks, device: Device) -> None:
    sets, comms = _sets(device), ranks.comms
    other = sets.pop(len(comms), None)  # of another thread, which was quicker
    sets[len(comms)] = ranks
    note(lambda: [comm.stats() for comm in comms])
    if other is not None:
        other.close()
    while len(sets) > _SETS_KEPT:
        sets.popitem(last=False)[1].close()


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
                    raise _lib.RingattnError(f"rank {rank} of {len(self._comms)} has no thread: {error}", "RA_NOMEM") from error
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
