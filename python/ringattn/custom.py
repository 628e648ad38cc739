"""Groups over a transport of one's own: ``Transport``, and ``custom_group`` which makes a group of it.

``ra_comm_custom`` of the C library, in Python. What torch.distributed and MPI offer comes through `_mailbox.py` instead.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from typing import Any, Callable, Optional

from . import _lib
from . import dist as _dist
from ._lib import CommOps
from ._mailbox import tag_of


class Transport:
    """How one rank's bytes travel to other ranks and theirs to it. Make a subclass, and a group of it by ``custom_group``.

    Messages go from rank to rank, and a receive gets the first message of its peer and tag that no receive before it got.
    Nothing but ``wait`` may block. Calls come from one thread at a time, not always the same one.

    A method that raises ConnectionError says that the peer is lost: every later call on the group fails with that reason. Any
    other exception ends the call and comes out of it.

    >>> import queue, threading, collections, torch, ringattn
    >>> class Queues(ringattn.Transport):
    ...     "Ranks that are threads of one process."
    ...     boxes = collections.defaultdict(queue.SimpleQueue)                    # by sender, receiver and tag
    ...     def post_send(self, peer, tag, buffer):
    ...         self.boxes[self.rank, peer, tag].put(bytes(buffer))
    ...     def post_receive(self, peer, tag, buffer):
    ...         return self.boxes[peer, self.rank, tag], buffer
    ...     def wait(self, request, seconds):
    ...         if request is None:                                               # a send: copied, so done at once
    ...             return 0
    ...         box, buffer = request
    ...         try:
    ...             message = box.get(timeout=seconds) if seconds > 0 else box.get_nowait()
    ...         except queue.Empty:
    ...             return None
    ...         buffer[: len(message)] = message
    ...         return len(message)
    >>> x = torch.randn(1, 10, 2, 8)
    >>> def rank(r):
    ...     group = ringattn.custom_group(Queues(r, 2))
    ...     mine = ringattn.shard(x, group)
    ...     results[r] = ringattn.attention(mine, mine, mine, group=group)
    >>> results = {}
    >>> threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    >>> for thread in threads: thread.start()
    >>> for thread in threads: thread.join()
    >>> torch.allclose(torch.cat([results[0], results[1]], 1), ringattn.attention(x, x, x), atol=1e-6)
    True
    """

    # True: only a thread that is inside a call may use the transport. Then no other thread can send heartbeats while this rank
    # computes, and the peers wait longer before they count it as lost.
    callers_thread_only = False

    def __init__(self, rank: int, ranks: int):
        if not 0 <= operator.index(rank) < operator.index(ranks):
            raise ValueError(f"rank is {rank} and ranks {ranks}; rank must be from 0 to ranks - 1")
        self.rank, self.ranks = operator.index(rank), operator.index(ranks)

    def post_send(self, peer: int, tag: int, buffer: memoryview) -> Any:
        """Starts sending the bytes of a buffer, which stays as it is until ``wait`` says that the request is done. Returns what
        ``wait`` is to be given."""
        raise NotImplementedError(f"{type(self).__name__} lacks post_send")

    def post_receive(self, peer: int, tag: int, buffer: memoryview) -> Any:
        """Starts receiving at most as many bytes as the buffer has. Returns what ``wait`` is to be given."""
        raise NotImplementedError(f"{type(self).__name__} lacks post_receive")

    def wait(self, request: Any, seconds: float) -> Optional[int]:
        """Waits for a request for at most ``seconds`` (0: does not wait). Returns None if it is not done, else the number of
        bytes received; for a send any number will do."""
        raise NotImplementedError(f"{type(self).__name__} lacks wait")

    def cancel(self, request: Any) -> bool:
        """Gives up a request. Returns True if nothing will touch its buffer any more; otherwise the buffer is never freed."""
        return True

    def abort(self, reason: str) -> None:
        """This rank gives up: tells the peers, without waiting for them."""

    def close(self) -> None:
        """The group is not used any more. Must not wait for peers."""


def custom_group(transport: Transport) -> Any:
    """A group for ``attention``, modules, ``shard`` and ``sync_gradients``, of the ranks that a ``Transport`` connects. Every
    rank makes one. It is closed when the process ends, or by ``ringattn.dist.close()``.

    ``Transport`` shows two ranks. One needs no transport:

    >>> import ringattn
    >>> ringattn.custom_group(ringattn.Transport(0, 1)).ranks
    1
    """
    if not isinstance(transport, Transport):
        raise ValueError(f"transport is a {type(transport).__name__}; it must be a ringattn.Transport")
    return _dist.adopt(_Link(transport))


class _Link:
    """Between the library's calls and a transport."""

    add = None  # gradients are added by way of the library

    def __init__(self, transport: Transport):
        self.transport, self.rank, self.ranks = transport, transport.rank, transport.ranks
        self._requests: dict[int, Any] = {}
        self._generation = 0  # of communicators that were made over the transport
        self._ids = itertools.count(1)
        self._lost = ""
        self._raised: Optional[BaseException] = None
        self._ops = CommOps(
            ctypes.sizeof(CommOps),
            _lib.CALLER_THREAD if transport.callers_thread_only else 0,
            _lib.POST_RECV(lambda _, *call: self._post(transport.post_receive, *call)),
            _lib.POST_SEND(lambda _, *call: self._post(transport.post_send, *call)),
            _lib.WAIT(lambda _, *call: self._guarded(self._wait, *call)),
            _lib.CANCEL(lambda _, number: self._guarded(self._cancel, number)),
            _lib.ABORT(lambda _, status: self._abort()),
            _lib.DESTROY(),
        )

    def _guarded(self, function: Callable[..., int], *arguments: Any) -> int:
        """No exception may pass through the library: it is kept for `reason`."""
        try:
            return function(*arguments)
        except ConnectionError as error:
            self._lost = str(error) or type(error).__name__
            return _lib.PEER_LOST
        except BaseException as error:
            self._raised = error
            return _lib.ABORTED

    def _post(self, post: Callable[..., Any], peer: int, tag: int, address: Optional[int], size: int, out: Any) -> int:
        def posted() -> int:
            buffer = memoryview((ctypes.c_char * size).from_address(address)).cast("B") if address else memoryview(bytearray())
            number = next(self._ids)
            self._requests[number] = post(peer, tag_of(tag, self._generation), buffer)
            out[0] = number
            return _lib.OK

        return self._guarded(posted)

    def _wait(self, number: int, seconds: float, done: Any, received: Any) -> int:
        done[0] = 0
        came = self.transport.wait(self._requests[number], seconds)
        if came is not None:
            del self._requests[number]
            done[0] = 1
            if received:  # NULL for a send
                received[0] = _lib.fits("what wait returns", came, ctypes.c_size_t)
        return _lib.OK

    def _cancel(self, number: int) -> int:
        request = self._requests.pop(number, None)
        return _lib.OK if self.transport.cancel(request) else _lib.INTERNAL

    def _abort(self) -> None:
        def aborted() -> int:
            self.transport.abort(_lib.last_error())
            return _lib.OK

        self._guarded(aborted)

    def communicator(self) -> int:
        """A new ra_comm of this rank over the transport; one before it is closed. All ranks make as many."""
        self._generation += 1
        handle = ctypes.c_void_p()
        status = _lib.lib.ra_comm_custom(ctypes.byref(self._ops), None, self.rank, self.ranks, ctypes.byref(handle))
        if status:
            _lib.fail(status, self.reason())
        return handle.value or 0

    def reason(self) -> str:
        """Why a call failed, for the sentence of an exception; raises what the transport raised."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        return self._lost

    def members(self) -> set[int]:
        raise ValueError("gradients that data parallelism has averaged need the ring to be a torch.distributed process group")

    def leave(self) -> None:
        self.transport.close()

    def end(self, deadline: float) -> None:
        pass
