"""Groups of ranks: what may be given as ``group``.

* ``None``: this process alone.
* an integer p: p ranks that are threads of this process; whole tensors in, whole tensors out.
* a ``torch.distributed`` process group: the ring runs over a gloo group of its own.
* an mpi4py communicator: the ring runs over a duplicate of it.
* what ``ringattn.custom_group`` makes of a transport of one's own.

The first call with a process group or a communicator is collective: every member must make it. Tensors may be on the CPU or on
a GPU: what goes from GPU to GPU travels by CUDA IPC, by NCCL, or staged in host memory, so what connects the processes need not
know of it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import operator
import os
import struct
import threading
import time
import weakref
from typing import Any, Iterator, Optional

from . import _lib
from ._config import Options, Problem, Settings, Shape, problem_for, rows_problem
from ._devices import CPU, Device
from ._engine import Alone, Communicator, Ranges, Tensor, lasting, run_on
from ._inprocess import InProcess
from ._transports import GlooMailbox, MpiMailbox

# ----------------------------------------------------------------------------------------------------------------------- groups

# What every rank tells every other, all in records of the same length: whether it takes part, if not why, else what the record
# is about, so that ranks that are at different places never take each other's numbers for their own, and then the numbers.
_HEAD = struct.Struct("<?31s")
_CALL = struct.Struct("<qqQ?16s")  # before a call: query rows, key rows, seed, whether buffers are kept, digest
_RECORD_BYTES = 512
PROCESSES = ("dist:", "mpi:", "custom:")  # how the keys of groups of processes begin
_PIECE = 1 << 20  # elements that are added at once where the transport cannot add
_AGREED = Settings._fields.index("threads")  # settings from here on are each rank's own


class Processes(Alone):
    """A group of processes, this one being a member."""

    def __init__(self, key: str, mailbox: Any):
        self.key, self.mailbox = key, mailbox
        self.rank, self.ranks = mailbox.rank, mailbox.ranks
        self.comm = Communicator(mailbox.communicator(), self.ranks, mailbox)
        self._digests: dict[Any, bytes] = {}
        self._gpu: Optional[Device] = None  # on which the communicator keeps workspaces

    def accept(self, device: Device) -> None:
        super().accept(device)
        if device is CPU:
            return
        if self._gpu is None:
            self._gpu = device
        if device is not self._gpu:
            raise ValueError(
                f"query is on {device.name}, and earlier calls of rank {self.rank} on this group were on {self._gpu.name}: a "
                f"rank of a group of processes keeps to one GPU"
            )

    def _digest(self, *what: Any) -> bytes:
        found = self._digests.get(what)
        if found is None:
            if len(self._digests) > 256:
                self._digests.clear()
            found = self._digests[what] = hashlib.blake2b(repr(what).encode(), digest_size=16).digest()
        return found

    def agree(self, options: Options, shape: Shape, seed: int, ranges: Ranges) -> tuple[Problem, int]:
        """The global problem of a call whose local shape is given. Ranks learn each other's rows, and take rank 0's seed."""
        replicated = options.query_placement == "replicated"
        local = self._digest(tuple(options)[:_AGREED], shape._replace(seq_q=0, seq_k=0), ranges)
        self.comm.set_timeouts(options)
        records = self._exchange("attention", _CALL.pack(shape.seq_q, shape.seq_k, seed, lasting(options), local))
        parts = [_CALL.unpack_from(record) for record in records]
        rows_q, rows_k = [part[0] for part in parts], [part[1] for part in parts]
        seq_q = max(rows_q) if replicated else sum(rows_q)
        seed = parts[0][2]
        problem = problem_for(options, shape._replace(seq_q=seq_q, seq_k=sum(rows_k)), self.rank == 0)
        self._check_rows(problem, rows_q, rows_k)
        for rank, part in enumerate(parts):
            if part[3] != parts[0][3]:
                keeper, other = (rank, 0) if part[3] else (0, rank)
                raise ValueError(
                    f"rank {keeper} keeps buffers and plans for its next call and rank {other} does not; "
                    f"enable_memory_pool and use_pattern_cache must be the same on every rank"
                )
        if any(part[4] != local for part in parts):
            self.comm.forget()  # the library compares the ranks when they plan, and says who differs in what
        return problem, seed

    def _exchange(self, about: str, mine: bytes) -> list[bytes]:
        """What every rank tells about the same thing; raises if one of them does not take part, or is at another thing."""
        head = _HEAD.pack(True, about.encode())
        records = self.comm.gather((head + mine).ljust(_RECORD_BYTES, b"\0"))
        for rank, other in enumerate(records):
            if not other[0]:
                reason = other[1:].rstrip(b"\0").decode(errors="replace")
                raise _lib.RingattnError(f"rank {rank} does not take part in the call: {reason}", "RA_ABORTED")
        for rank, other in enumerate(records):
            if not other.startswith(records[0][: _HEAD.size]):
                first, there = (_HEAD.unpack_from(x)[1].rstrip(b"\0").decode() for x in (records[0], other))
                raise _lib.RingattnError(
                    f"ranks disagree: rank 0 is at {first} and rank {rank} at {there}; every rank must make the same calls, "
                    f"and what one of them gives (a key_padding_mask, say) all must give",
                    "RA_DISAGREE",
                )
        return [record[_HEAD.size :] for record in records]

    def _check_rows(self, problem: Problem, rows_q: list[int], rows_k: list[int]) -> None:
        options, shape = problem.options, problem.shape
        for rank in range(self.ranks):
            expected_q, expected_k = problem.shard_count(rank, self.ranks)
            if options.query_placement == "replicated":
                expected_q = shape.seq_q
            for name, given, expected, whole in (
                ("query", rows_q[rank], expected_q, shape.seq_q),
                ("key", rows_k[rank], expected_k, shape.seq_k),
            ):
                if given != expected:
                    raise ValueError(
                        f"rank {rank} of {self.ranks} holds {given} {name} rows; with layout {options.layout} and "
                        f"query_placement {options.query_placement} it must hold {expected} of {whole}"
                    )

    def refuse(self, reason: str) -> None:
        try:
            self.comm.gather((b"\0" + reason.encode()[: _RECORD_BYTES - 1]).ljust(_RECORD_BYTES, b"\0"))
        except _lib.RingattnError:
            pass  # the caller has a better reason to raise

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
        if not lasting(problem.options):
            self.renew()
        run_on(self.comm, call, problem, seed, ranges, device.stream(), tensors)

    def renew(self) -> None:
        """Another communicator over the same transport, without the buffers and plans of the old one."""
        self.comm.close()
        self.comm = Communicator(self.mailbox.communicator(), self.ranks, self.mailbox)

    def gather(self, about: str, numbers: list[int]) -> list[list[int]]:
        """Every rank's list of integers, all of the same length. ``about`` is what users call the thing (31 letters)."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        limit = (_RECORD_BYTES - _HEAD.size) // 8
        for begin in range(0, max(1, len(numbers)), limit):
            part = numbers[begin : begin + limit]
            for rank, record in enumerate(self._exchange(about, struct.pack(f"<{len(part)}q", *part))):
                found[rank] += struct.unpack_from(f"<{len(part)}q", record)
        return found

    def gather_memory(self, mine: int, everyone: int, size: int) -> None:
        """Every rank's ``size`` bytes at address ``mine``, in rank order, at address ``everyone``."""
        with self.comm.lock:
            status = _lib.lib.ra_comm_allgather(self.comm.handle, mine, everyone, size)
        if status:
            self.comm.fail(status)

    def positions(self, about: str, rows: int, layout: str) -> tuple[int, Any]:
        """The number of rows on all ranks, and the global positions of this rank's ones (a tensor)."""
        import torch

        total = sum(count for (count,) in self.gather(about, [rows]))
        problem = rows_problem(layout, total)
        runs = problem.shards(self.ranks)[self.rank][1]
        return total, torch.cat([torch.arange(count, device="cpu") * step + start for start, step, count in runs])

    def add(self, flat: Any) -> None:
        """Adds a contiguous tensor of one dimension over the ranks, in place."""
        if self.mailbox.add is not None:
            self.mailbox.add(flat)
            return
        import torch

        narrow = flat.is_floating_point() and flat.element_size() < 4
        for part in flat.detach().split(_PIECE):
            mine = part.cpu().float() if narrow else part.cpu()
            every = torch.empty((self.ranks, mine.numel()), dtype=mine.dtype, device="cpu")
            self.gather_memory(mine.data_ptr(), every.data_ptr(), mine.nbytes)
            part.copy_(every.sum(0))

    def members(self) -> set[int]:
        """The ranks of torch.distributed that form the group."""
        members: set[int] = self.mailbox.members()
        return members

    def leave(self) -> None:
        self.comm.close()
        self.mailbox.leave()

    def retire(self) -> None:
        """The caller's group is gone, on this rank and soon on the others."""
        self.comm.close()
        self.mailbox.retire()


_ALONE = Alone()
_in_process: dict[int, InProcess] = {}
_processes: dict[str, tuple[Any, Processes]] = {}  # by key: the caller's group (weak where it can be), ours
_lock = threading.RLock()


def resolve(group: Any) -> Any:
    """What stands behind ``group``; made the first time."""
    if group is None:
        return _ALONE
    if isinstance(group, Alone):
        return group
    if isinstance(group, str):
        return _by_key(group)
    if isinstance(group, bool) or (hasattr(group, "__index__") and not hasattr(group, "rank")):
        return _threads_of(group)
    _refuse_no_group(group)
    if _is_mpi(group):
        return _mpi(group)
    if _is_mesh(group):
        group = group.get_group()
    if hasattr(group, "group_name") and callable(getattr(group, "rank", None)):
        return _torch(group)
    raise ValueError(
        f"group is a {type(group).__name__}; it must be None, a number of in-process ranks, a torch.distributed process "
        f"group, an mpi4py communicator or a ringattn.custom_group"
    )


def _is_mpi(group: Any) -> bool:
    return type(group).__module__.split(".")[0] == "mpi4py"


def _is_mesh(group: Any) -> bool:
    return hasattr(group, "get_group") and hasattr(group, "mesh")


def _refuse_no_group(group: Any) -> None:
    if _is_mpi(group) and not group:
        raise ValueError(
            "group is MPI.COMM_NULL: this process is no member of the communicator and must not call, or has freed it"
        )
    if _is_mesh(group) and group.ndim != 1:
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions; give the one along which the sequence is divided: "
            f"mesh['its name'], or mesh.get_group(its number)"
        )


def refusal(group: Any, error: Exception) -> Exception:
    """``error``, to be raised by a rank that does not take part in a call: it is told to the others, who would wait."""
    resolve(group).refuse(str(error))
    return error


@contextlib.contextmanager
def telling(where: Any) -> Iterator[None]:
    """What is refused here, on this rank, is told to the others."""
    try:
        yield
    except ValueError as error:
        where.refuse(str(error))
        raise


def size_of(group: Any) -> int:
    """The number of ranks. Unlike ``resolve`` never collective: a module may be printed by one rank alone."""
    _refuse_no_group(group)
    for name in ("size", "Get_size"):  # of a process group or mesh, and of an MPI communicator
        if callable(getattr(group, name, None)):
            return int(getattr(group, name)())
    ranks: int = resolve(group).ranks
    return ranks


def place_of(group: Any) -> Optional[tuple[int, int]]:
    """(rank, ranks) of this process in a group of processes, None where whole tensors go in and out: alone, or with in-process
    ranks. Like ``size_of`` never collective."""
    _refuse_no_group(group)
    for name in ("rank", "get_local_rank", "Get_rank"):  # of a process group, of a mesh and of an MPI communicator
        if callable(getattr(group, name, None)):
            return None if size_of(group) == 1 else (int(getattr(group, name)()), size_of(group))
    where = resolve(group)
    return (where.rank, where.ranks) if isinstance(where, Processes) else None


def key_of(group: Any) -> str:
    """A name of a group for the arguments of a torch operator, which cannot hold objects."""
    key: str = resolve(group).key
    return key


def _by_key(key: str) -> Any:
    if not key:
        return _ALONE
    kind, _, name = key.partition(":")
    if kind == "threads":
        return _threads_of(int(name))
    found = _processes.get(key)
    if found is not None:
        return found[1]
    if kind == "dist":
        from torch.distributed import distributed_c10d

        return _torch(distributed_c10d._resolve_process_group(name))  # type: ignore[attr-defined,arg-type]
    raise ValueError(f"group {key!r} is unknown in this process")


def _threads_of(ranks: Any) -> Any:
    if isinstance(ranks, bool) or not 1 <= operator.index(ranks) <= 512:
        raise ValueError(
            f"group is {ranks!r}; a number of in-process ranks must be from 1 to 512 "
            f"(a process that is no member of a process group must not call)"
        )
    ranks = operator.index(ranks)
    if ranks == 1:
        return _ALONE
    found = _in_process.get(ranks)
    if found is None:
        found = _in_process[ranks] = InProcess(ranks)
    return found


def _torch(group: Any) -> Any:
    key = "dist:" + group.group_name
    if type(group).__name__ == "FakeScriptObject":  # what torch.compile shows in its place
        return _by_key(key)
    found = _processes.get(key)
    if found is not None and found[0]() is group:
        return found[1]
    if group.size() == 1:
        return _ALONE
    with _lock:
        # Another group may have had this name, before torch.distributed was started anew.
        _leave([name for name, (_, made) in _processes.items() if name == key or _is_destroyed(name, made)])
        made = Processes(key, GlooMailbox(group))
        _processes[key] = (weakref.ref(group), made)
        return made


def _is_destroyed(key: str, made: Processes) -> bool:
    from torch.distributed import distributed_c10d

    return key.startswith("dist:") and made.mailbox.callers not in distributed_c10d._world.pg_map


def _mpi(comm: Any) -> Any:
    if comm.Get_size() == 1:
        return _ALONE
    with _lock:
        found = _processes.get(comm.Get_attr(_mpi_attribute()) or "")
        if found is None:
            key = f"mpi:{next(_numbers)}"
            found = _processes[key] = (None, Processes(key, MpiMailbox(comm)))
            comm.Set_attr(_mpi_attribute(), key)
        return found[1]


@functools.lru_cache(None)
def _mpi_attribute() -> int:
    """In which a communicator holds the key of what is made for it. MPI gives the handle of a freed communicator to another
    one, but deletes its attributes."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval(delete_fn=lambda comm, attribute, key: _retire(key))


def _retire(key: str) -> None:
    found = _processes.pop(key, None)
    if found is not None:
        found[1].retire()


_numbers = itertools.count()


def adopt(link: Any) -> Any:
    """A group over a link to other ranks that the caller has made."""
    if link.ranks == 1:
        return _ALONE
    with _lock:
        key = f"custom:{next(_numbers)}"
        made = Processes(key, link)
        _processes[key] = (None, made)
        return made


def close() -> None:
    """Leaves every group of processes that this process is a member of; takes a second or two at most. Done at exit."""
    with _lock:
        _leave(list(_processes))


def _leave(keys: list[str]) -> None:
    groups = [_processes.pop(key)[1] for key in keys]
    for group in groups:
        group.leave()
    deadline = time.monotonic() + 1.0
    for group in groups:
        group.mailbox.end(deadline)


atexit.register(close)
os.register_at_fork(after_in_child=_processes.clear)  # a forked child is no rank
