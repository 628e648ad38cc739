"""Is another process of this machine alive? The operating system knows, even while that process cannot send a message."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple


class Process(NamedTuple):
    """What identifies a process, on any machine and at any time."""

    machine: str  # this boot of it, and its view of process numbers; "": not known
    number: int
    started: str


def _stat(number: int) -> list[str]:
    """State, parent and so on: the fields behind the name, which may hold anything."""
    with open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()


@functools.lru_cache
def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        return ""


def this_process() -> Process:
    number = os.getpid()
    return Process(_machine(), number, _stat(number)[19] if _machine() else "")


def lives(other: Process) -> bool:
    """Whether a process runs or sleeps: it has not ended, and nobody has stopped it. False where that is not known."""
    if not other.machine or other.machine != _machine():
        return False
    try:
        fields = _stat(other.number)
        return fields[19] == other.started and fields[0] in "RSD"
    except (OSError, IndexError):
        return False
