"""Memory of large results.

Fresh memory costs a page fault for each page, which the system clears first. In a dilated backward call, whose results
are several times as large as what it computes, that took up to a third of the time. So a large result lies in a block of its
own, of large pages where the system has them, and when the result is gone the block waits for the next one of its size.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from typing import Optional

SMALL = 1 << 20  # bytes; smaller results come from torch's allocator
MOST = 128 << 20  # bytes that may wait; beyond that a block goes back to the system at once
PATIENCE = 64  # a block that has waited for so many results goes back, too
LARGE_PAGE = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it


class Block:
    """Fresh memory, of which `size` bytes begin where a large page may."""

    def __init__(self, size: int):
        self.size = size
        room = LARGE_PAGE if size >= LARGE_PAGE else 0
        self.map = mmap.mmap(-1, size + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.begin = -ctypes.addressof(ctypes.c_char.from_buffer(self.map)) % LARGE_PAGE if room else 0
        if room and _ADVICE is not None:
            try:
                self.map.madvise(_ADVICE)
            except OSError:
                pass  # the system has none


class Blocks:
    """Blocks that wait, oldest first. A result may go at any moment, in any thread, also while `take` runs: what happens then
    takes no lock, and only ever appends."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Block]] = deque()  # and the number of the result after which it came back
        self._taken: dict[int, tuple[weakref.ref[memoryview], Block]] = {}  # by id of the reference
        self._results = 0

    def take(self, size: int) -> Optional[tuple[memoryview, int]]:
        """Memory for a result, with anything in it: a view, and where in it the result begins. It comes back when the view
        itself is gone, so whatever uses it must hold that (a tensor that torch.frombuffer made does, with all of its parts; a
        slice of the view does not). None: there is none."""
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._results += 1
        block = self._waiting_of(whole)
        if block is None:
            try:
                block = Block(whole)
            except OSError:
                return None
        view = memoryview(block.map)
        reference = weakref.ref(view, self._give_back)
        self._taken[id(reference)] = reference, block
        return view, block.begin

    def waiting(self) -> int:
        """Bytes that wait."""
        return sum([block.size for _, block in tuple(self._waiting)])

    def _waiting_of(self, size: int) -> Optional[Block]:
        found = None
        for _ in range(len(self._waiting)):
            try:
                since, block = self._waiting.popleft()
            except IndexError:  # another thread was faster
                break
            if found is None and block.size == size:
                found = block
            elif self._results - since <= PATIENCE:
                self._waiting.append((since, block))
        return found

    def _give_back(self, reference: weakref.ref[memoryview]) -> None:
        _, block = self._taken.pop(id(reference))
        if block.size + self.waiting() <= MOST:
            self._waiting.append((self._results, block))


blocks = Blocks()
