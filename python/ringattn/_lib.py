"""The C library, as ctypes sees it: the declarations of ringattn.h and ringattn_cuda.h, as far as they are used.

The shared library lies beside this file in an installed package. ``RINGATTN_LIBRARY`` names another one.
"""

from __future__ import annotations

import ctypes
import operator
import os
from ctypes import c_bool, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Sequence

# The enums of ringattn.h; their values are pinned.
OK, INVALID, NOMEM, IO, PEER_LOST, TIMEOUT, DISAGREE, PROTOCOL, NOT_AVAILABLE, ABORTED, DEVICE, INTERNAL = range(12)
F32, BF16, F16, F64 = range(4)
COMBINE = {"heads": 0, "mix": 1}
OFFSET = {"branch": 0, "head": 1, "head-block": 2, "residue": 3}
LAYOUT = {"contiguous": 0, "zigzag": 1, "striped": 2}
PLACEMENT = {"sharded": 0, "replicated": 1}
SCHEDULE = {"auto": 0, "ring": 1, "gather": 2, "merge": 3}
SCHEDULE_NAMES = {code: name for name, code in SCHEDULE.items()}
CPU, CUDA = 0, 1
DTYPE_NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16", F64: "float64"}


# ctypes keeps the low bits of an integer that does not fit and says nothing: 2**64 would arrive as 0. So every struct that is
# filled here, every array and every argument of a function is checked.

# The least value of each kind, and its bits.
_RANGE = {
    c_int: (-(1 << 31), 32),
    c_int32: (-(1 << 31), 32),
    c_int64: (-(1 << 63), 64),
    c_uint32: (0, 32),
    c_uint64: (0, 64),
    c_size_t: (0, 64),
}
_ARGUMENT = {"window_left": "window", "window_right": "window"}  # what users call a field, where that is another name


def fits(name: str, value: Any, kind: Any = c_int64) -> int:
    """The value as an integer, if a C integer of that kind can hold it."""
    name = _ARGUMENT.get(name, name)
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None
    least, bits = _RANGE[kind]
    if not least <= number < least + (1 << bits):
        raise ValueError(f"{name} is {number}; it must fit into {bits} bits")
    return number


def int64_array(name: str, values: Sequence[int]) -> Any:
    return (c_int64 * len(values))(*[fits(name, value) for value in values])


class Struct(ctypes.Structure):
    _integers: dict[str, Any]

    def __init_subclass__(cls) -> None:
        cls._integers = {name: kind for name, kind, *_ in cls._fields_ if kind in _RANGE}

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self._integers.get(name)
        if kind is not None:
            value = fits(name, value, kind)
        super().__setattr__(name, value)


class Desc(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("dtype", c_int),
        ("batch", c_int64),
        ("seq_q", c_int64),
        ("seq_k", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("segment_lengths", ctypes.POINTER(c_int64)),
        ("dilation_rates", ctypes.POINTER(c_int64)),
        ("branches", c_int64),
        ("combine", c_int),
        ("offset", c_int),
        ("dilate_queries", c_bool),
        ("causal", c_bool),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("key_begin", ctypes.POINTER(c_int64)),
        ("key_end", ctypes.POINTER(c_int64)),
        ("scale", c_double),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("layout", c_int),
        ("query_placement", c_int),
        ("schedule", c_int),
        ("bucket", c_int64),
        ("memory_limit", c_int64),
        ("device", c_int),
        ("kernel", c_char_p),
        ("threads", c_int32),
        ("checksum", c_bool),
        ("cu_seqlens", ctypes.POINTER(c_int64)),
        ("softcap", c_double),
        ("sinks", c_void_p),
    ]


class Rows(Struct):
    _fields_ = [("start", c_int64), ("step", c_int64), ("count", c_int64)]


class Shard(Struct):
    _fields_ = [("count", c_int64), ("rows", Rows * 2)]


class Summary(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("rows_q", c_int64),
        ("rows_k", c_int64),
        ("pairs", c_int64),
        ("holes", c_int64),
        ("bytes_sent", c_int64),
        ("bytes_sent_backward", c_int64),
        ("hops", c_int64),
        ("items", c_int64),
        ("shard_bytes", c_int64),
        ("shard_bytes_backward", c_int64),
        ("workspace_bytes", c_int64),
        ("workspace_bytes_backward", c_int64),
        ("schedule", c_int),
        ("bucket", c_int64),
        ("reason", ctypes.c_char * 160),
        ("state_rows", c_int64),
    ]


class Meeting(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("query_rank", c_int32),
        ("key_rank", c_int32),
        ("round", c_int64),
        ("bucket", c_int64),
        ("hop", c_int64),
        ("step", c_int64),
    ]


class Stats(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("steps", c_int64),
        ("bytes_sent", c_int64),
        ("bytes_received", c_int64),
        ("compute_seconds", c_double),
        ("wait_seconds", c_double),
        ("pool_in_use", c_int64),
        ("pool_peak", c_int64),
        ("pool_hits", c_int64),
        ("pool_misses", c_int64),
        ("cache_hits", c_int64),
        ("cache_misses", c_int64),
        ("cache_entries", c_int64),
    ]


class KernelInfo(Struct):
    _fields_ = [("name", c_char_p), ("available", c_bool), ("reason", c_char_p)]


POST_RECV = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_uint64, c_void_p, c_size_t, ctypes.POINTER(c_void_p))
POST_SEND = POST_RECV
WAIT = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_double, ctypes.POINTER(c_int), ctypes.POINTER(c_size_t))
CANCEL = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)
ABORT = ctypes.CFUNCTYPE(None, c_void_p, c_int)
DESTROY = ctypes.CFUNCTYPE(None, c_void_p)


class CommOps(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("post_recv", POST_RECV),
        ("post_send", POST_SEND),
        ("wait", WAIT),
        ("cancel", CANCEL),
        ("abort", ABORT),
        ("destroy", DESTROY),
    ]


CALLER_THREAD = 1  # a flag of CommOps


# name: (result, arguments). A c_int is an ra_status; of ra_recommended_dtype it is a dtype, of ra_plan_schedule a schedule.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ra_status_name": (c_char_p, [c_int]),
    "ra_last_error": (c_char_p, []),
    "ra_version": (c_char_p, []),
    "ra_attention_desc_init": (None, [ctypes.POINTER(Desc)]),
    "ra_attention_desc_check": (c_int, [ctypes.POINTER(Desc)]),
    "ra_recommended_dtype": (c_int, [c_int]),
    "ra_shard_rows": (c_int, [ctypes.POINTER(Desc), c_int, c_int, ctypes.POINTER(Shard), ctypes.POINTER(Shard)]),
    "ra_comm_self": (c_int, [ctypes.POINTER(c_void_p)]),
    "ra_comm_threads": (c_int, [c_int, ctypes.POINTER(c_void_p)]),
    "ra_comm_custom": (c_int, [ctypes.POINTER(CommOps), c_void_p, c_int, c_int, ctypes.POINTER(c_void_p)]),
    "ra_comm_set_timeout": (c_int, [c_void_p, c_double, c_double]),
    "ra_comm_set_call_timeout": (c_int, [c_void_p, c_double]),
    "ra_comm_abort": (None, [c_void_p, c_int, c_char_p]),
    "ra_comm_destroy": (None, [c_void_p]),
    "ra_comm_stats": (c_int, [c_void_p, ctypes.POINTER(Stats)]),
    "ra_comm_allgather": (c_int, [c_void_p, c_void_p, c_void_p, c_int64]),
    "ra_plan_create": (c_int, [c_void_p, ctypes.POINTER(Desc), ctypes.POINTER(c_void_p)]),
    "ra_plan_destroy": (None, [c_void_p]),
    "ra_plan_summary": (c_int, [ctypes.POINTER(Desc), c_int, c_int, ctypes.POINTER(Summary)]),
    "ra_plan_meeting": (c_int, [ctypes.POINTER(Desc), c_int, c_int64, c_int64, c_int64, c_int64, ctypes.POINTER(Meeting)]),
    "ra_plan_check_backward": (c_int, [c_void_p]),
    "ra_plan_workspace": (c_int64, [c_void_p, c_bool]),
    "ra_plan_schedule": (c_int, [c_void_p]),
    "ra_plan_bucket": (c_int64, [c_void_p]),
    "ra_plan_kernel": (c_char_p, [c_void_p]),
    "ra_plan_reason": (c_char_p, [c_void_p]),
    "ra_plan_report": (c_int64, [c_void_p, c_char_p, c_size_t]),
    "ra_forward": (c_int, [c_void_p, c_void_p]),
    "ra_backward": (c_int, [c_void_p, c_void_p]),
    "ra_stats": (c_int, [c_void_p, ctypes.POINTER(Stats)]),
    "ra_kernel_list": (c_bool, [c_int, ctypes.POINTER(KernelInfo)]),
    "ra_cpu_features": (c_char_p, []),
    "ra_cuda_open_stream": (c_int, [ctypes.POINTER(c_void_p)]),
    "ra_cuda_close_stream": (None, [c_void_p]),
    "ra_cuda_mark": (c_int, [c_void_p, ctypes.POINTER(c_void_p)]),
    "ra_cuda_wait": (c_int, [c_void_p, c_void_p]),
    "ra_cuda_forget": (None, [c_void_p]),
}


class RingattnError(RuntimeError):
    """A failure that is not a wrong argument: a lost rank, a timeout, no memory, a missing kernel.

    ``status`` is the library's name for it, such as ``"RA_PEER_LOST"``.

    >>> import numpy as np, ringattn
    >>> x = np.ones((1, 8, 2, 4), np.float32)
    >>> try:
    ...     ringattn.attention(x, x, x, kernel="abacus")
    ... except ringattn.RingattnError as error:
    ...     print(error.status)
    RA_NOT_AVAILABLE
    """

    def __init__(self, message: str, status: str):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> Any:  # so that it gets from a worker process to the one that waits for it
        return type(self), (*self.args, self.status), self.__dict__


def _find() -> str:
    named = os.environ.get("RINGATTN_LIBRARY")
    if named:
        return named
    here = Path(__file__).parent
    for pattern in ("libringattn.so", "libringattn.so.*", "libringattn.dylib"):
        for path in sorted(here.glob(pattern)):
            return str(path)
    raise ImportError(
        f"libringattn.so is not in {here}: install the package (pip install .), or set RINGATTN_LIBRARY to the library"
    )


def _checked(function: str, kind: Any) -> Any:
    """An argument's type: for integers one that checks them."""
    if kind not in _RANGE:
        return kind
    convert = staticmethod(lambda value: kind(fits(f"an argument of {function}", value, kind)))
    return type(f"checked {kind.__name__}", (), {"from_param": convert})


def _load() -> ctypes.CDLL:
    path = _find()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, [_checked(name, kind) for kind in arguments]
    desc = Desc()
    library.ra_attention_desc_init(desc)
    if desc.struct_size != ctypes.sizeof(Desc):
        raise ImportError(
            f"{path} is version {library.ra_version().decode()} and its descriptor has {desc.struct_size} bytes; "
            f"this package expects {ctypes.sizeof(Desc)}"
        )
    return library


lib = _load()
version: str = lib.ra_version().decode()


def last_error() -> str:
    sentence: bytes = lib.ra_last_error()
    return sentence.decode(errors="replace")


def fail(status: int, detail: str = "") -> None:
    """Raises the exception of a failed call, with the library's own sentence."""
    name = lib.ra_status_name(status).decode()
    sentence = last_error() or name
    if detail:
        sentence = f"{sentence} ({detail})"
    if status == INVALID:
        raise ValueError(sentence)
    raise RingattnError(sentence, name)


def check(status: int) -> None:
    if status:
        fail(status)
