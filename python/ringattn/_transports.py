"""Mailboxes over torch.distributed (gloo) and over mpi4py. Neither is imported before it is asked for."""

from __future__ import annotations

import ctypes
import json
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Iterable, Optional

from . import _lib
from ._mailbox import FRAME, HEADER, LEFT, LONG, Mailbox, Polled, Request
from ._process import Process, this_process

_START_TIMEOUT = 600.0
_GOODBYES = 2.0  # seconds, for the other ranks to free a communicator
_FOREVER = timedelta(days=3650)


# ------------------------------------------------------------------------------------------------------------ torch.distributed


class GlooMailbox(Mailbox):
    """Frames over a gloo process group that nobody else uses.

    gloo can only wait for a message, not look for one, and a wait that times out breaks all of its connections. So each peer
    that is listened to has a thread that waits for frames, and each peer that is sent to has one that sends them.
    """

    FRAMES, PAYLOADS = 1, 2  # gloo's tags

    def __init__(self, group: Any):
        import torch
        import torch.distributed as dist

        if not dist.is_gloo_available():
            raise _lib.RingattnError("a ring of processes runs over gloo, which this build of torch lacks", "RA_NOT_AVAILABLE")
        super().__init__(group.rank(), group.size())
        self.torch, self.callers = torch, group
        store, self.peers = self._meet()
        # Not new_group: the name that it gives a group depends on how many others a rank is in, where members may differ.
        self.group: Any = dist.ProcessGroupGloo(store, self.rank, self.ranks, timedelta(seconds=_START_TIMEOUT))
        self.readers: dict[int, threading.Thread] = {}
        self.writers: dict[int, tuple[threading.Thread, queue.SimpleQueue[Any]]] = {}

    def _meet(self) -> tuple[Any, list[Process]]:
        """Waits for every rank. A store whose keys nobody else uses, neither another group nor an earlier one of this name, and
        the ranks' processes."""
        from torch.distributed import DistStoreError, distributed_c10d
        from torch.distributed.distributed_c10d import PrefixStore

        default = distributed_c10d._get_default_store()
        starts, count = PrefixStore(f"ringattn/{self.callers.group_name}", default), f"starts of rank {self.rank}"
        store = PrefixStore(str(starts.add(count, 1)), starts)  # all ranks start as often
        keys = [f"rank {rank}" for rank in range(self.ranks)]
        store.set(keys[self.rank], json.dumps(this_process()))
        try:
            store.wait(keys, timedelta(seconds=_START_TIMEOUT))
        except DistStoreError as error:
            missing = [key for key in keys if not _holds(store, key)]
            store.delete_key(keys[self.rank])  # this rank has not come
            starts.add(count, -1)
            raise _lib.RingattnError(
                f"{', '.join(missing)} of {self.ranks} made no call on this group within {_START_TIMEOUT:g} seconds; every "
                f"member must make the first call",
                "RA_TIMEOUT",
            ) from error
        return store, [Process(*json.loads(store.get(key))) for key in keys]

    def add(self, flat: Any) -> None:
        try:
            self.callers._get_backend(flat.device)
        except RuntimeError:  # nccl, which knows no memory of the host
            self.group.allreduce([flat]).wait()
        else:
            self.torch.distributed.all_reduce(flat, group=self.callers)

    def members(self) -> set[int]:
        return set(self.torch.distributed.get_process_group_ranks(self.callers))

    def _tensor(self, address: int, size: int) -> Any:
        return self.torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=self.torch.uint8)

    def listen(self, peer: int) -> None:
        if peer not in self.readers and peer not in self.lost:
            thread = threading.Thread(target=self._read, args=(peer,), name=f"ringattn from rank {peer}", daemon=True)
            self.readers[peer] = thread
            thread.start()

    def _read(self, peer: int) -> None:
        frame = self.torch.empty(FRAME, dtype=self.torch.uint8, device="cpu")
        view = memoryview(frame.numpy())  # type: ignore[arg-type]
        try:
            while True:
                self.group.recv([frame], peer, self.FRAMES).wait(_FOREVER)
                kind, tag, length = HEADER.unpack_from(view)
                if kind == LONG:
                    request, memory, address = self.incoming_long(peer, tag, length)
                    self.group.recv([self._tensor(address, length)], peer, self.PAYLOADS).wait(_FOREVER)
                    self.incoming_long_done(peer, tag, length, request, memory)
                else:
                    self.incoming_short(peer, kind, tag, bytes(view[HEADER.size : HEADER.size + length]))
                    if kind == LEFT:
                        return
        except RuntimeError as error:
            self.lose(peer, _lib.PEER_LOST, f"rank {peer} is gone: {_first_line(error)}")

    def _writer(self, peer: int) -> queue.SimpleQueue[Any]:
        found = self.writers.get(peer)
        if found is None:
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(target=self._write, args=(peer, jobs), name=f"ringattn to rank {peer}", daemon=True)
            found = self.writers[peer] = (thread, jobs)
            thread.start()
        return found[1]

    def send_frame(self, peer: int, frame: bytes) -> None:
        self._writer(peer).put(frame)

    def start(self, request: Request) -> None:
        request.started = True
        self._writer(request.peer).put(request)

    def _write(self, peer: int, jobs: queue.SimpleQueue[Any]) -> None:
        try:
            while True:
                job = jobs.get()
                if job is None:
                    return
                if isinstance(job, Request):
                    self._send(HEADER.pack(LONG, job.tag, job.size), peer)
                    self.group.send([self._tensor(job.address, job.size)], peer, self.PAYLOADS).wait(_FOREVER)
                    self.sent(job)
                else:
                    self._send(job, peer)
        except RuntimeError as error:
            self.lose(peer, _lib.PEER_LOST, f"rank {peer} is gone: {_first_line(error)}")

    def _send(self, frame: bytes, peer: int) -> None:
        self.group.send([self.torch.frombuffer(bytearray(frame), dtype=self.torch.uint8)], peer, self.FRAMES).wait(_FOREVER)

    def leave(self) -> None:
        """Says goodbye."""
        with self.changed:
            for peer in set(self.readers) | set(self.writers):
                if peer not in self.lost:
                    self.send_frame(peer, HEADER.pack(LEFT, 0, 0))
            for _, jobs in self.writers.values():
                jobs.put(None)

    def end(self, deadline: float) -> None:
        """Ends the threads, whatever the peers do: by the deadline if they say goodbye too, soon after it if not."""
        threads = [thread for thread, _ in self.writers.values()] + list(self.readers.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for _ in range(10):
            waiting = [peer for peer, thread in self.readers.items() if thread.is_alive()]
            if not waiting and not any(thread.is_alive() for thread in threads):
                return
            # The only way to wake a thread that waits inside gloo: a wait that times out closes the connections of the group.
            for peer in waiting or range(self.ranks):
                if peer != self.rank:
                    try:
                        self.group.recv([self.torch.empty(1, device="cpu")], peer, 3).wait(timedelta(milliseconds=1))
                    except RuntimeError:
                        pass
            for thread in threads:
                thread.join(0.2)


def _holds(store: Any, key: str) -> bool:
    try:
        store.wait([key], timedelta(milliseconds=10))
    except RuntimeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    place = text.find("] ")
    return (text[place + 2 :] if text.startswith("[") and place > 0 else text).split(". This is typically")[0]


# -------------------------------------------------------------------------------------------------------------------------- MPI


class MpiMailbox(Polled):
    """Frames over a duplicate of an mpi4py communicator. Bytes move while the library or an exchange waits."""

    FRAMES, PAYLOADS = 1, 2  # MPI's tags
    PIECE = 1 << 30  # MPI counts in int: longer messages go in pieces

    def __init__(self, comm: Any):
        from mpi4py import MPI

        self.MPI, self.comm = MPI, comm.Dup()
        # The library's heartbeat thread may only call MPI beside the caller's own calls if MPI is ready for that.
        free = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        super().__init__(comm.Get_rank(), comm.Get_size(), 0 if free else _lib.CALLER_THREAD)
        self.peers = self.comm.allgather(this_process())
        # MPI requests, memory that they read, the library's request
        self._sends: list[tuple[list[Any], Any, Optional[Request]]] = []
        self._receives: list[tuple[list[Any], int, int, int, Optional[Request], Any]] = []

    def add(self, flat: Any) -> None:
        total = flat.detach().to("cpu").float() if flat.element_size() < 4 else flat.detach().to("cpu", copy=True)
        array = total.numpy()
        for begin in range(0, array.size, self.PIECE // 8):
            self.comm.Allreduce(self.MPI.IN_PLACE, array[begin : begin + self.PIECE // 8])
        flat.copy_(total)

    def members(self) -> set[int]:
        raise ValueError("gradients of a DistributedDataParallel module need the ring to be a torch.distributed process group")

    def _memory(self, address: int, size: int) -> Any:
        maker = getattr(self.MPI, "buffer", None) or self.MPI.memory
        return maker.fromaddress(address, size)

    def _pieces(self, address: int, size: int) -> Iterable[Any]:
        for begin in range(0, size, self.PIECE):
            yield [self._memory(address + begin, min(self.PIECE, size - begin)), self.MPI.BYTE]

    def send_frame(self, peer: int, frame: bytes) -> None:
        memory = bytearray(frame)
        self._sends.append(([self.comm.Isend([memory, self.MPI.BYTE], peer, self.FRAMES)], memory, None))

    def start(self, request: Request) -> None:
        request.started = True
        self.send_frame(request.peer, HEADER.pack(LONG, request.tag, request.size))
        pieces = [self.comm.Isend(piece, request.peer, self.PAYLOADS) for piece in self._pieces(request.address, request.size)]
        self._sends.append((pieces, None, request))

    def progress(self) -> None:
        status = self.MPI.Status()
        while True:
            message = self.comm.Improbe(self.MPI.ANY_SOURCE, self.FRAMES, status)
            if message is None:
                break
            frame = bytearray(status.Get_count(self.MPI.BYTE))
            peer = status.Get_source()
            message.Recv([frame, self.MPI.BYTE])
            kind, tag, length = HEADER.unpack_from(frame)
            if kind == LONG:
                request, memory, address = self.incoming_long(peer, tag, length)
                parts = [self.comm.Irecv(piece, peer, self.PAYLOADS) for piece in self._pieces(address, length)]
                self._receives.append((parts, peer, tag, length, request, memory))
            else:
                self.incoming_short(peer, kind, tag, bytes(frame[HEADER.size : HEADER.size + length]))
        if self._receives:
            waiting = []
            for entry in self._receives:
                if all(part.Test() for part in entry[0]):
                    self.incoming_long_done(*entry[1:])
                else:
                    waiting.append(entry)
            self._receives = waiting
        if self._sends:
            sending = []
            for send in self._sends:
                if not all(part.Test() for part in send[0]):
                    sending.append(send)
                elif send[2] is not None:
                    self.sent(send[2])
            self._sends = sending

    def leave(self) -> None:
        """Says goodbye, unless MPI is gone already; also to who has left, and waits for it."""
        if self.MPI.Is_finalized():
            return
        with self.changed:
            for peer in range(self.ranks):
                if peer != self.rank:
                    self.send_frame(peer, HEADER.pack(LEFT, 0, 0))

    def end(self, deadline: float) -> None:
        """Lets what is on its way arrive, the goodbyes of the others included: MPI_Finalize wants no message left over. The
        duplicate is left to it, too: freeing it would wait for the peers."""
        with self.changed:
            while not self.MPI.Is_finalized() and time.monotonic() < deadline:
                self.progress()
                if self._is_quiet():
                    return
                time.sleep(0.001)

    def _is_quiet(self) -> bool:
        return not self._sends and len(self.lost) == self.ranks - 1

    def retire(self) -> None:
        """The caller's communicator is being freed, which every rank does. Then each frees the duplicate, too, unless one does
        not come or gave up: then messages may be left over in it."""
        if self.MPI.Is_finalized():
            return
        self.leave()
        self.end(time.monotonic() + _GOODBYES)
        if self._is_quiet():
            self.comm.Free()
