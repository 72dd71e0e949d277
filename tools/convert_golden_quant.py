#!/usr/bin/env python3
"""Turns the recorded cases of quantise and dequantise into the file that tests read.

    tools/convert_golden_quant.py FOLDER [OUTPUT]

FOLDER holds quant.json and quant.npz as recorded from the Python package; OUTPUT is tests/data/golden/quant.bin unless
given. The format is described in tests/data/golden/README.md. Prints how many cases of each kind were written.
"""

import ast
import collections
import json
import pathlib
import struct
import sys
import zipfile

OPERATIONS = ["roundtrip", "dequant", "error"]
SOURCES = ["float32", "float16", "bfloat16"]
NO_SOURCE = 3


def raw_bytes(archive, reference):
    """The bytes of an array in C order, little-endian; bfloat16 is stored as uint16."""
    npy = archive.read(reference["array"] + ".npy")
    assert npy[:6] == b"\x93NUMPY", reference
    header_size = struct.unpack_from("<H", npy, 8)[0] if npy[6] == 1 else struct.unpack_from("<I", npy, 8)[0]
    start = (10 if npy[6] == 1 else 12) + header_size
    header = ast.literal_eval(npy[start - header_size:start].decode())
    assert not header["fortran_order"] and header["descr"][0] in "<|", header
    assert header["shape"] == tuple(reference["shape"]), header
    return npy[start:]


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return value


def text(value):
    data = value.encode()
    return struct.pack("<B", len(data)) + data


def record(case, archive):
    name = text(case["id"].removeprefix("quant/"))
    operation = struct.pack("<B", OPERATIONS.index(case["op"]))
    if case["op"] == "error":
        return name + operation + text(case["error"]["text"])
    source = SOURCES.index(case["x"]["dtype"]) if "x" in case else NO_SOURCE
    rows = 1
    for size in case["scale"]["shape"]:
        rows *= size
    out = name + operation + struct.pack("<BBII", case["bits"], source, rows, case["head_dim"])
    if source != NO_SOURCE:
        out += raw_bytes(archive, case["x"])
    out += raw_bytes(archive, case["q"]) + raw_bytes(archive, case["scale"])
    out += struct.pack("<Q", fnv1a(raw_bytes(archive, case["dequant"])))
    if source != NO_SOURCE:
        out += struct.pack("<Q", fnv1a(raw_bytes(archive, case["dequant_in_source_dtype"])))
    return out


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    default = pathlib.Path(__file__).resolve().parent.parent / "tests/data/golden/quant.bin"
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else default
    cases = json.loads((folder / "quant.json").read_text())["cases"]
    with zipfile.ZipFile(folder / "quant.npz") as archive:
        output.write_bytes(b"".join(record(case, archive) for case in cases))
    counts = collections.Counter(case["op"] for case in cases)
    print(f"{output}: {len(cases)} cases", ", ".join(f"{counts[op]} {op}" for op in OPERATIONS))


if __name__ == "__main__":
    main()
