"""A tiny .safetensors writer and reader, so that tests need no package."""
import json
import struct

import numpy as np

TYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64, "U8": np.uint8}


def bf16(array):
    """float32 to the 16 bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


def dump(path, tensors, pad=0, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}; pad: spaces after the header."""
    header, body = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    raw(path, json.dumps(header).encode() + b" " * pad, body)


def raw(path, header, body=b"", length=None):
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header) if length is None else length) + header + body)


def tensor(array, dtype="F32"):
    array = np.asarray(array)
    data = bf16(array) if dtype == "BF16" else np.ascontiguousarray(array, TYPES[dtype])
    return dtype, array.shape, data.tobytes()


def load(path):
    with open(path, "rb") as f:
        data = f.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    result, end = {}, 0
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = info["data_offsets"]
        assert begin == end, "a hole or an overlap"
        end = stop
        result[name] = np.frombuffer(data[8 + length + begin:8 + length + stop], TYPES[info["dtype"]]).reshape(info["shape"])
    assert 8 + length + end == len(data), "bytes after the last tensor"
    return result
