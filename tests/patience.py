"""For tests whose verdict depends on the clock, as support_patience.h is for those in C.

A trial that fails while the machine kept a thread waiting for more than a quarter of the timeout has proved nothing, and is
repeated with doubled timeouts.
"""

import os
import threading
import time

ATTEMPTS = 5
NAP = 0.005

_factor = 1.0


class Failed(Exception):
    """A trial that proved something, or never did."""


class _Watch(threading.Thread):
    """Notes by how much it comes late, on one core."""

    def __init__(self, core):
        super().__init__(daemon=True)
        self.core, self.due, self.most = core, time.monotonic() + NAP, 0.0

    def run(self):
        os.sched_setaffinity(0, {self.core})  # of this thread alone
        while True:  # from one look to the next, and from when the thread was asked for to the first, no time goes unseen
            now = time.monotonic()
            self.most, self.due = max(self.most, now - self.due), now + NAP
            time.sleep(NAP)

    def late(self):
        return max(self.most, time.monotonic() - self.due)


_watches = []


def factor():
    """Timeouts, and limits that follow from them, are multiplied by this."""
    return _factor


def repeat(trial, timeout, between=lambda: None):
    """Returns what trial() returns, whose timeouts are factor() times this one or longer. Failed, if trial() raises an
    AssertionError although the machine was in time, or in all attempts; between() is called before each further one."""
    global _factor
    if not _watches:
        _watches.extend(_Watch(core) for core in os.sched_getaffinity(0))
        for watch in _watches:
            watch.start()
    before = _factor
    try:
        for attempt in range(ATTEMPTS):
            _factor = before * 2**attempt
            for watch in _watches:
                watch.most = 0.0
            try:
                return trial()
            except AssertionError as error:
                late = max(watch.late() for watch in _watches)
                told = f"{error}\nthe machine was up to {late:.3f} s late"
                if late <= timeout * _factor / 4 or attempt + 1 == ATTEMPTS:
                    raise Failed(told) from error
            print(f"{told}, which proves nothing: again, with twice the patience", flush=True)
            between()
    finally:
        _factor = before
