"""A transport for ra_comm_custom over something that can send bytes from process to process in order.

The library posts receives by (peer, tag) with 64-bit tags, asks how many bytes came, and gives up requests. Neither gloo nor
MPI offers all of that, so messages travel as frames on one stream a peer, and are matched here:

    [ kind 8 | tag 8 | length 8 | payload, if it fits into INLINE bytes ]      then the payload alone, if it does not

A frame whose receive is posted already is read straight into its buffer; one that comes early waits in memory of its own. The
same streams carry the news that a rank gave up or left.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time
from collections import deque
from typing import Any, Callable, Optional

from . import _lib
from ._lib import CommOps
from ._process import Process, lives

HEADER = struct.Struct("<QQQ")
INLINE = 8192 - HEADER.size
FRAME = HEADER.size + INLINE
SHORT, LONG, GAVE_UP, LEFT = range(4)
CONTROL_TAG = 1 << 63  # RA_LINK_OWN_TAG: of the library's heartbeats
_FIRST_BIT, _MASK = 32, (1 << 30) - 1  # of a tag, in which the library leaves bits 20 to 62 free (RA_LINK_TAG_BITS)


def tag_of(tag: int, generation: int) -> int:
    """The tag by which a message of the n-th communicator over a transport travels. The last words of one communicator may come
    when the next is there already, and must not be taken for that one's."""
    return tag | (generation & _MASK) << _FIRST_BIT


class Request:
    """A send or a receive that the library has posted."""

    __slots__ = ("peer", "tag", "control", "address", "size", "receiving", "done", "received", "status", "started")

    def __init__(self, peer: int, tag: int, generation: int, address: int, size: int, receiving: bool):
        self.peer, self.tag, self.control = peer, tag_of(tag, generation), tag == CONTROL_TAG
        self.address, self.size, self.receiving = address, size, receiving
        self.done, self.received, self.status, self.started = False, 0, _lib.OK, False


class Mailbox:
    """Matching and bookkeeping; a subclass moves the bytes.

    A subclass gives `start(request)` (send a long message), `send_frame(peer, frame)` (send a short frame that nobody waits
    for), `listen(peer)` (from now on, read what this peer sends) and calls `incoming` for each frame that comes. All of its
    calls into this class hold no lock; all calls from this class hold `changed`.
    """

    def __init__(self, rank: int, ranks: int, flags: int = 0):
        self.rank, self.ranks = rank, ranks
        self.changed = threading.Condition(threading.RLock())
        self.requests: dict[int, Request] = {}
        self.posted: dict[tuple[int, int], deque[Request]] = {}
        self.early: dict[tuple[int, int], deque[Any]] = {}
        self.lost: dict[int, tuple[int, str]] = {}  # peer: status and reason
        self.timeout = 60.0  # seconds of silence after which the library counts a peer as lost
        self.peers: list[Process] = []  # of each rank, where that is known
        self._heard: dict[int, float] = {}
        self.given_up: Optional[int] = None  # the status of the first rank that said it gave up: then nobody can finish
        self.interrupt: Optional[BaseException] = None
        self._generation = 0  # of communicators that were made over this
        self._ids = itertools.count(1)
        self._ops = CommOps(
            ctypes.sizeof(CommOps),
            flags,
            _lib.POST_RECV(self._post_recv),
            _lib.POST_SEND(self._post_send),
            _lib.WAIT(self._wait),
            _lib.CANCEL(self._cancel),
            _lib.ABORT(self._abort),
            _lib.DESTROY(),
        )

    # What a subclass provides.

    def start(self, request: Request) -> None:
        raise NotImplementedError

    def send_frame(self, peer: int, frame: bytes) -> None:
        raise NotImplementedError

    def listen(self, peer: int) -> None:
        raise NotImplementedError

    def wait_until(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Waits with `changed` held."""
        return self.changed.wait_for(happened, seconds)

    # Frames that come in.

    def incoming_short(self, peer: int, kind: int, tag: int, payload: bytes) -> None:
        with self.changed:
            self._hear(peer, tag)
            if kind == SHORT:
                request = self._take(peer, tag)
                if request is None:
                    self.early.setdefault((peer, tag), deque()).append(payload)
                else:
                    self._fill(request, payload, len(payload))
            elif kind == GAVE_UP:
                self.given_up = self.given_up or tag
                self._lose(peer, tag, f"rank {peer} gave up: {payload.decode(errors='replace')}")
            elif kind == LEFT:
                self._lose(peer, _lib.PEER_LOST, f"rank {peer} left the group")
            self.changed.notify_all()

    def incoming_long(self, peer: int, tag: int, length: int) -> tuple[Optional[Request], Any, int]:
        """Where the payload of a long frame goes: (request, owner of the memory, address)."""
        with self.changed:
            self._hear(peer, tag)
            request = self._take(peer, tag)
            if request is not None and request.size >= length:
                request.started = True
                return request, None, request.address
            memory = ctypes.create_string_buffer(length)
            return request, memory, ctypes.addressof(memory)

    def incoming_long_done(self, peer: int, tag: int, length: int, request: Optional[Request], memory: Any) -> None:
        with self.changed:
            if request is not None:
                request.received, request.done = length, True
                request.status = _lib.PROTOCOL if memory is not None else _lib.OK
            else:  # a receive may have been posted since
                request = self._take(peer, tag)
                if request is None:
                    self.early.setdefault((peer, tag), deque()).append(memory)
                else:
                    self._fill(request, memory, length)
            self.changed.notify_all()

    def sent(self, request: Request) -> None:
        with self.changed:
            request.done = True
            self.changed.notify_all()

    def lose(self, peer: int, status: int, reason: str) -> None:
        with self.changed:
            self._lose(peer, status, reason)
            self.changed.notify_all()

    def _lose(self, peer: int, status: int, reason: str) -> None:
        self.lost.setdefault(peer, (status, reason))

    def _hear(self, peer: int, tag: int) -> None:
        if self._is_current(tag):
            self._heard[peer] = time.monotonic()

    def _is_current(self, tag: int) -> bool:
        return tag >> _FIRST_BIT & _MASK == self._generation & _MASK

    def _take(self, peer: int, tag: int) -> Optional[Request]:
        queue = self.posted.get((peer, tag))
        if not queue:
            return None
        request = queue.popleft()
        if not queue:
            del self.posted[peer, tag]
        return request

    @staticmethod
    def _fill(request: Request, payload: Any, length: int) -> None:
        if length > request.size:
            request.status = _lib.PROTOCOL
        else:
            ctypes.memmove(request.address, payload, length)
        request.received, request.done = length, True

    def reason(self) -> str:
        """Why ranks are lost, for the sentence of an exception; raises what interrupted the library's wait."""
        with self.changed:
            interrupt, self.interrupt = self.interrupt, None
            if interrupt is not None:
                raise interrupt
            return "; ".join(reason for _, reason in self.lost.values())

    # The library's calls. An exception must not leave them.

    def _post(self, peer: int, tag: int, address: int, size: int, receiving: bool, out: Any) -> int:
        try:
            with self.changed:
                request = Request(peer, tag, self._generation, address or 0, size, receiving)
                tag = request.tag
                if receiving:
                    self.listen(peer)
                    waiting = self.early.get((peer, tag))
                    if waiting:
                        payload = waiting.popleft()
                        if not waiting:
                            del self.early[peer, tag]
                        self._fill(request, payload, len(payload))
                    else:
                        self.posted.setdefault((peer, tag), deque()).append(request)
                elif size <= INLINE:  # copied, so that the library's buffer is free again at once
                    self.send_frame(peer, HEADER.pack(SHORT, tag, size) + ctypes.string_at(address, size))
                    request.done = True
                else:
                    self.start(request)
                number = next(self._ids)
                self.requests[number] = request
                out[0] = number
            return _lib.OK
        except BaseException as error:
            self.interrupt = error
            return _lib.ABORTED

    def _post_recv(self, _: Any, peer: int, tag: int, address: int, size: int, out: Any) -> int:
        return self._post(peer, tag, address, size, True, out)

    def _post_send(self, _: Any, peer: int, tag: int, address: int, size: int, out: Any) -> int:
        return self._post(peer, tag, address, size, False, out)

    def _wait(self, _: Any, number: int, seconds: float, done: Any, received: Any) -> int:
        try:
            with self.changed:
                request = self.requests[number]

                def happened() -> bool:
                    return request.done or request.peer in self.lost or self.given_up is not None

                self.wait_until(happened, seconds)
                done[0] = 0
                if request.done:
                    del self.requests[number]
                    done[0] = 1
                    if received:  # NULL for a send
                        received[0] = request.received
                    return request.status
                if request.peer in self.lost:
                    return self._finish(number, self.lost[request.peer][0])
                if self.given_up is not None:
                    return self._finish(number, self.given_up)
                if request.control and request.receiving and self._speaks_for(request.peer):
                    self._finish(number, _lib.OK)
                    done[0], received[0] = 1, 0  # an empty control message: the peer lives
                return _lib.OK
        except BaseException as error:  # Ctrl-C arrives here, in the middle of the library's wait
            self.interrupt = error
            return _lib.ABORTED

    def _speaks_for(self, peer: int) -> bool:
        """Whether to tell the library that a silent peer is alive. Heartbeats go through Python here, so a peer in which some
        thread holds the GIL for long cannot send any; but on the same machine the operating system knows that it is neither
        dead nor stopped."""
        now = time.monotonic()
        if peer >= len(self.peers) or now - self._heard.get(peer, now) < self.timeout / 2 or not lives(self.peers[peer]):
            return False
        self._heard[peer] = now - 3 * self.timeout / 8  # asked again after an eighth of the timeout
        return True

    def _finish(self, number: int, status: int) -> int:
        """Ends a request that failed: its buffer is not written any more, unless the transport is inside it."""
        request = self.requests.pop(number)
        self._withdraw(request)
        return status

    def _withdraw(self, request: Request) -> bool:
        queue = self.posted.get((request.peer, request.tag))
        if queue and request in queue:
            queue.remove(request)
            if not queue:
                del self.posted[request.peer, request.tag]
        return not request.started or request.done

    def _cancel(self, _: Any, number: int) -> int:
        try:
            with self.changed:
                request = self.requests.pop(number, None)
                return _lib.OK if request is None or self._withdraw(request) else _lib.INTERNAL
        except BaseException as error:
            self.interrupt = error
            return _lib.INTERNAL

    def _abort(self, _: Any, status: int) -> None:
        try:
            reason = _lib.last_error().encode()[:1000]
            with self.changed:
                for peer in range(self.ranks):
                    if peer != self.rank and peer not in self.lost:
                        self.send_frame(peer, HEADER.pack(GAVE_UP, status, len(reason)) + reason)
        except Exception:
            pass

    def communicator(self) -> int:
        """A new ra_comm of this rank over this transport; one before it is closed. All ranks make as many."""
        with self.changed:
            self._generation += 1
            self._heard.clear()
            self.early = {key: waiting for key, waiting in self.early.items() if self._is_current(key[1])}
        handle = ctypes.c_void_p()
        _lib.check(_lib.lib.ra_comm_custom(ctypes.byref(self._ops), None, self.rank, self.ranks, ctypes.byref(handle)))
        return handle.value or 0


class Polled(Mailbox):
    """A mailbox whose bytes move only when somebody looks: `progress` reads what has come and finishes what is done."""

    def progress(self) -> None:
        raise NotImplementedError

    def listen(self, peer: int) -> None:
        pass

    def wait_until(self, happened: Callable[[], bool], seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, 0.0
        while True:
            self.progress()
            if happened():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause + 10e-6, 500e-6)
