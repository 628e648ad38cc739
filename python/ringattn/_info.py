"""What the library is, what this machine offers, and what a call would do."""

from __future__ import annotations

from ctypes import c_int
from typing import Any, Optional

from . import _lib
from ._config import Settings, Shape, make_options, problem_for
from ._lib import KernelInfo, lib


def info() -> dict[str, Any]:
    """Version, CPU features, kernels (with the reason why one cannot run here) and the recommended dtype.

    >>> import ringattn
    >>> sorted(ringattn.info())
    ['cpu_features', 'kernels', 'recommended_dtype', 'version']
    """
    kernels, found, index = [], KernelInfo(), 0
    while lib.ra_kernel_list(index, found):
        kernels.append({"name": found.name.decode(), "available": found.available, "reason": found.reason.decode()})
        index += 1
    return {
        "version": _lib.version,
        "cpu_features": lib.ra_cpu_features().decode(),
        "kernels": kernels,
        "recommended_dtype": recommended_dtype(),
    }


def recommended_dtype(device: str = "cpu") -> str:
    """The dtype that runs fastest on this machine's best kernel at usual accuracy, by name.

    >>> import ringattn
    >>> ringattn.recommended_dtype() in ("float32", "bfloat16", "float16")
    True
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be cpu or cuda")
    return _lib.DTYPE_NAMES[lib.ra_recommended_dtype(_lib.CUDA if device == "cuda" else _lib.CPU)]


def describe(
    seq: int,
    heads: int,
    head_dim: int,
    ranks: int = 1,
    kv_heads: Optional[int] = None,
    batch: int = 1,
    seq_q: Optional[int] = None,
    dtype: str = "float32",
    **settings: Any,
) -> list[dict[str, Any]]:
    """What each rank of a call would hold, compute and send: exact, and without computing anything.

    A list with a dictionary for each rank: rows, attended pairs, rows without any key (``holes``), bytes sent forward and
    backward, bytes of shards and workspace, and the schedule and bucket that are chosen, with the reason. ``settings`` are
    those of ``ringattn.attention``: the pattern, the masks, the layout and so on.

    >>> import ringattn
    >>> plan = ringattn.describe(seq=1 << 20, heads=8, head_dim=64, ranks=4, is_causal=True, layout="zigzag")
    >>> [rank["rows_q"] for rank in plan]
    [262144, 262144, 262144, 262144]
    """
    codes = {name: code for code, name in _lib.DTYPE_NAMES.items()}
    if dtype not in codes:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(codes)}")
    unknown = set(settings) - set(Settings._fields)
    if unknown:
        raise TypeError(f"describe() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    ranks = _lib.fits("ranks", ranks, c_int)
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    options = make_options(Settings(**settings))
    shape = Shape(codes[dtype], _lib.CPU, batch, seq if seq_q is None else seq_q, seq, heads, kv_heads or heads, head_dim)
    problem = problem_for(options, shape, warn=False)
    return [_as_dict(problem.summary(rank, ranks)) for rank in range(ranks)]


def _as_dict(summary: _lib.Summary) -> dict[str, Any]:
    found = {field[0]: getattr(summary, field[0]) for field in summary._fields_ if field[0] != "struct_size"}
    return {**found, "schedule": _lib.SCHEDULE_NAMES[summary.schedule], "reason": summary.reason.decode()}
