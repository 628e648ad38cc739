"""Functions that take turns on a GPU, timed by its own clock."""

import statistics

HEAD_START = 500_000  # cycles, about 0.3 ms
REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError)


def say_left_out(what, error):
    print(f"  {what} left out: {(str(error).splitlines() or [''])[0][:100]}", flush=True)


def turns(ways, repeat, warm_up=2, head_start=HEAD_START):
    """{name: median milliseconds} of functions that take turns."""
    import torch

    times = {name: [] for name in ways}
    for turn in range(repeat + warm_up):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(head_start)
            start.record()
            way()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}
