"""Hostile and odd files, each with the exit code that `run --q FILE` must end with. All hold, or claim to hold, q of shape
[1, 4, 1, 2], float32. As a program it writes them, and some command lines, as seeds for fuzzers: corpus.py DIRECTORY."""
import json
import os
import pickle
import re
import struct
import sys

BODY = struct.pack("<8f", *range(8))
GOOD, FILE = 0, 3


def npy(header, body=BODY, version=(1, 0), length=None, magic=b"\x93NUMPY"):
    header = header if isinstance(header, bytes) else header.encode("latin1")
    size = len(header) if length is None else length
    return magic + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", size) + header + body


def entry(descr="'<f4'", order="False", shape="(1, 4, 1, 2)"):
    return "{'descr': %s, 'fortran_order': %s, 'shape': %s, }" % (descr, order, shape)


def npy_files():
    yield "good", npy(entry()), GOOD
    yield "good-version-2", npy(entry(), version=(2, 0)), GOOD
    yield "good-version-3", npy(entry(), version=(3, 0)), GOOD
    yield "good-padded", npy(entry() + " " * 500 + "\n"), GOOD
    yield "good-double-quotes", npy(entry().replace("'", '"')), GOOD
    yield "good-other-order", npy("{'shape': (1, 4, 1, 2), 'descr': '<f4', 'fortran_order': False}"), GOOD
    yield "good-long-integers", npy(entry(shape="(1L, 4L, 1L, 2L)")), GOOD
    yield "empty", b"", FILE
    yield "one-byte", b"\x93", FILE
    yield "magic-alone", b"\x93NUMPY", FILE
    yield "magic-wrong", npy(entry(), magic=b"\x93NUMPX"), FILE
    yield "text", b"1.0 2.0 3.0\n", FILE
    yield "pickle", pickle.dumps([1.0, 2.0]), FILE
    yield "pickle-of-code", b"cos\nsystem\n(S'touch owned'\ntR.", FILE
    yield "version-0", npy(entry(), version=(0, 0)), FILE
    yield "version-4", npy(entry(), version=(4, 0)), FILE
    yield "version-1.1", npy(entry(), version=(1, 1)), FILE
    yield "version-255", npy(entry(), version=(255, 255)), FILE
    yield "length-0", npy(entry(), length=0), FILE
    yield "length-short", npy(entry(), length=20), FILE
    yield "length-beyond-file", npy(entry(), length=65535), FILE
    yield "length-4-gib", npy(entry(), version=(2, 0), length=0xFFFFFFFF), FILE
    yield "length-2-gib", npy(entry(), version=(3, 0), length=0x7FFFFFFF), FILE
    yield "header-11000", npy(entry() + " " * 11000, version=(2, 0)), FILE
    yield "header-binary", npy(bytes(range(256))), FILE
    yield "header-nul", npy(entry() + "\0"), FILE
    yield "header-code", npy("__import__('os').system('touch owned')"), FILE
    yield "header-lambda", npy(entry(shape="(lambda: 1)()")), FILE
    yield "header-nested", npy("{" * 5000), FILE
    yield "header-list", npy("['descr', '<f4']"), FILE
    yield "header-unclosed", npy(entry()[:-1]), FILE
    yield "header-string-unclosed", npy("{'descr"), FILE
    yield "header-trailing", npy(entry() + "{}"), FILE
    yield "key-missing", npy("{'descr': '<f4', 'shape': (1, 4, 1, 2)}"), FILE
    yield "key-twice", npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1, 4, 1, 2)}"), FILE
    yield "key-unknown", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4, 1, 2), 'x': 1}"), FILE
    yield "key-not-string", npy("{1: 2}"), FILE
    yield "order-true", npy(entry(order="True")), FILE
    yield "order-number", npy(entry(order="0")), FILE
    yield "order-none", npy(entry(order="None")), FILE
    for name in ("<i4", "<u4", "|b1", "<c8", "<f16", "<V2", "|S4", "<U1", "|O", "<M8[ns]", ">f4", "=f4", "f", "", "<f", "<f44"):
        yield "descr-" + "".join(c if c.isalnum() else "_" for c in name), npy(entry(descr=repr(name))), FILE
    yield "descr-record", npy(entry(descr="[('a', '<f4')]")), FILE
    yield "descr-number", npy(entry(descr="4")), FILE
    yield "descr-long", npy(entry(descr="'" + "<f4" * 1000 + "'")), FILE
    for name, shape in (("scalar", "()"), ("integer", "4"), ("one", "(8,)"), ("parenthesis", "(8)"),
                        ("negative", "(1, -4, 1, 2)"),
                        ("real", "(1, 4.0, 1, 2)"), ("text", "('4',)"), ("none", "(None,)"), ("power", "(1, 2**2, 1, 2)"),
                        ("larger", "(1, 5, 1, 2)"), ("smaller", "(1, 3, 1, 2)"), ("2-63", "(9223372036854775807, 1, 1, 2)"),
                        ("2-64", "(18446744073709551616, 1, 1, 2)"), ("wraps", "(4294967296, 4294967296, 1, 2)"),
                        ("wraps-to-32", "(2305843009213693956, 2, 1, 2)"), ("googol", "(1" + "0" * 100 + ", 1, 1, 2)"),
                        ("dims-9", "(1, 1, 1, 1, 1, 1, 4, 1, 2)"), ("dims-1000", "(" + "1, " * 1000 + ")"),
                        ("tera", "(1, 1000000000000, 1, 2)"),
                        ("list", "[1, 4, 1, 2]"), ("commas", "(1,, 4, 1, 2)"), ("leading-comma", "(, 1)")):
        yield "shape-" + name, npy(entry(shape=shape)), FILE
    yield "shape-leading-zero", npy(entry(shape="(01, 4, 1, 2)")), FILE
    yield "shape-long-integers-of-version-3", npy(entry(shape="(1L, 4L, 1L, 2L)"), version=(3, 0)), FILE
    yield "header-indented", npy("\n  " + entry()), FILE
    yield "body-missing", npy(entry(), b""), FILE
    yield "body-short", npy(entry(), BODY[:-1]), FILE
    yield "body-long", npy(entry(), BODY + b"\0"), FILE


def safetensors(header, body=BODY, length=None):
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def safetensors_files():
    q = {"dtype": "F32", "shape": [1, 4, 1, 2], "data_offsets": [0, 32]}

    def with_(**change):
        return {"q": {**q, **change}}

    text = json.dumps(q)
    yield "good", safetensors({"q": q}), GOOD
    yield "good-metadata", safetensors({"__metadata__": {"a": "b"}, "q": q}), GOOD
    yield "good-padded", safetensors(json.dumps({"q": q}).encode() + b" " * 64), GOOD
    yield "good-second", safetensors({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                                      "q": {**q, "data_offsets": [8, 40]}}, b"\0" * 8 + BODY), GOOD
    yield "good-empty-tensor", safetensors({"a": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}, "q": q}), GOOD
    yield "empty", b"", FILE
    yield "seven-bytes", b"\0" * 7, FILE
    yield "length-0", safetensors(b"", b""), FILE
    yield "length-beyond-file", safetensors({"q": q}, length=10000), FILE
    yield "length-100-mb", safetensors({"q": q}, length=100000001), FILE
    yield "length-2-63", safetensors({"q": q}, length=2**63), FILE
    yield "length-2-64", safetensors({"q": q}, length=2**64 - 1), FILE
    yield "length-wraps", safetensors({"q": q}, length=2**64 - 8), FILE
    yield "header-short", safetensors({"q": q}, length=10), FILE
    yield "header-not-json", safetensors(b"{'q': 1}"), FILE
    yield "header-array", safetensors([q]), FILE
    yield "header-leading-space", safetensors(b" " + json.dumps({"q": q}).encode()), FILE
    yield "header-trailing-garbage", safetensors(json.dumps({"q": q}).encode() + b"x"), FILE
    yield "header-not-utf8", safetensors(b'{"\xff": 1}'), FILE
    yield "header-nested", safetensors(b'{"q":' + b"[" * 10000), FILE
    yield "header-nul", safetensors(b'{"q\\u0000": %s}' % text.encode()), FILE
    yield "header-nul-byte", safetensors(json.dumps({"q": q}).replace("[1,", "[1\0,").encode()), FILE
    yield "header-minus-zero", safetensors(json.dumps({"q": q}).replace("[0,", "[-0,").encode()), FILE
    yield "header-deep", safetensors(b'{"x": ' + b"[" * 127 + b"]" * 127 + b', "q": ' + text.encode() + b"}"), FILE
    yield "name-twice", safetensors(('{"q": %s, "q": %s}' % (text, text)).encode()), FILE
    yield "name-missing", safetensors({"p": q}), FILE
    twice = b'{"q": {"dtype": "F32", "dtype": "F32", "shape": [1, 4, 1, 2], "data_offsets": [0, 32]}}'
    yield "field-twice", safetensors(twice), FILE
    yield "entry-not-object", safetensors({"q": [1]}), FILE
    yield "metadata-not-object", safetensors({"__metadata__": 1, "q": q}), FILE
    yield "metadata-not-strings", safetensors({"__metadata__": {"a": 1}, "q": q}), FILE
    for name in ("F33", "f32", "float32", "I32", "BOOL", "F8_E4M3", ""):
        yield "dtype-" + (name or "none"), safetensors(with_(dtype=name)), FILE
    yield "dtype-number", safetensors(with_(dtype=32)), FILE
    yield "dtype-wider", safetensors(with_(dtype="F64")), FILE
    for name, shape in (("negative", [1, -4, 1, 2]), ("real", [1, 4.0, 1, 2]), ("text", "1,4,1,2"), ("null", None),
                        ("larger", [1, 5, 1, 2]),
                        ("smaller", [1, 3, 1, 2]), ("wraps", [2**62, 2**62, 1, 2]), ("2-64", [2**64, 1, 1, 2]),
                        ("dims-9", [1] * 7 + [4, 2]),
                        ("two", [4, 2])):
        yield "shape-" + name, safetensors(with_(shape=shape)), FILE
    for name, offsets in (("negative", [-32, 0]), ("reversed", [32, 0]), ("three", [0, 32, 32]), ("one", [32]),
                          ("real", [0, 32.0]),
                          ("hole", [8, 40]), ("beyond", [32, 64]), ("short", [0, 28]), ("2-63", [2**63 - 32, 2**63]),
                          ("2-64", [0, 2**64]), ("null", None)):
        yield "offsets-" + name, safetensors(with_(data_offsets=offsets)), FILE
    yield "overlap", safetensors({"q": q, "p": {**q, "data_offsets": [16, 48]}}, BODY + BODY[:16]), FILE
    yield "same-bytes-twice", safetensors({"q": q, "p": q}), FILE
    yield "hole-between", safetensors({"q": q, "p": {**q, "data_offsets": [36, 68]}}, BODY + b"\0" * 36), FILE
    yield "body-missing", safetensors({"q": q}, b""), FILE
    yield "body-short", safetensors({"q": q}, BODY[:-1]), FILE
    yield "body-long", safetensors({"q": q}, BODY + b"\0"), FILE
    yield "field-missing-dtype", safetensors({"q": {"shape": [1, 4, 1, 2], "data_offsets": [0, 32]}}), FILE
    yield "field-missing-shape", safetensors({"q": {"dtype": "F32", "data_offsets": [0, 32]}}), FILE
    yield "field-missing-offsets", safetensors({"q": {"dtype": "F32", "shape": [1, 4, 1, 2]}}), FILE


def command_lines():
    """Those of the manual, word by word."""
    page = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "cli.md")
    with open(page) as f:
        for n, line in enumerate(re.findall(r"^ringattn (.*)$", f.read(), re.M)):
            yield str(n), b"\0".join(word.encode() for word in line.split()), None


def main(directory):
    for part, files in (("npy", npy_files()), ("safetensors", safetensors_files()), ("options", command_lines())):
        os.makedirs(os.path.join(directory, part), exist_ok=True)
        for name, data, _ in files:
            with open(os.path.join(directory, part, name), "wb") as f:
                f.write(data)


if __name__ == "__main__":
    main(sys.argv[1])
