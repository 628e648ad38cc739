"""Ctrl-C in the middle of calls on in-process ranks, once and again and again; leaves what went wrong as an assertion."""

import signal
import sys
import threading
import time

import numpy as np
import ringattn

N, RANKS = 6000, 4


def ranks():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ringattn rank")]


def at_work():
    """The ranks that are inside a pass, and not merely about to end."""
    frames, found = sys._current_frames(), []
    for thread in ranks():
        frame = frames.get(thread.ident)
        while frame is not None and frame.f_code.co_name != "run_on":
            frame = frame.f_back
        if frame is not None:
            found.append(thread.name)
    return found


def interrupted(x, delay, again):
    """Whether a call on x was interrupted after `delay` seconds; with `again`, then over and over."""
    try:
        signal.setitimer(signal.ITIMER_REAL, delay, again)
        ringattn.attention(x, x, x, group=RANKS, threads=1)
        return False
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert again or not at_work(), f"{at_work()} are still at work"
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    rng = np.random.default_rng(0)
    small = rng.standard_normal((1, 37, 2, 8), dtype=np.float32)
    expected = ringattn.attention(small, small, small)
    start = time.monotonic()
    ringattn.attention(*[rng.standard_normal((1, N, 4, 64), dtype=np.float32)] * 3, group=RANKS, threads=1)
    whole = time.monotonic() - start
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    count = 0
    for part in (0.0001, 0.001, 0.01, 0.1, 0.3, 0.5):
        for again in (0.0, 0.002):
            x = rng.standard_normal((1, N, 4, 64), dtype=np.float32)  # gone as soon as the call has raised
            try:
                count += interrupted(x, max(1e-6, part * whole), again)
            except KeyboardInterrupt:  # the last of many
                count += 1
            del x
            for thread in ranks():
                if thread.ident is not None:  # else the interrupt came before it began
                    thread.join()
            found = ringattn.attention(small, small, small, group=RANKS)
            assert np.abs(found - expected).max() < 1e-5
    assert count >= 6, f"{count} of 12 calls were interrupted"


main()
