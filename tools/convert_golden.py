#!/usr/bin/env python3
"""Turns golden vectors of the seed (JSON and npz) into text lines and plain bytes, which C++ tests read without a JSON
library.

    tools/convert_golden.py FOLDER_IN FOLDER_OUT

Reads {tables,traces,attention}.json and {traces,attention}.npz; writes {tables,traces,attention}.txt and
{traces,attention}.bin. tests/data/golden/README.md says what they hold. The same input gives the same bytes.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np


def quoted(text):
    """A string of one word: every byte that is not a plain printable character as %XX."""
    plain = lambda byte: 33 <= byte <= 126 and chr(byte) not in '%",'
    return '"%s"' % "".join(chr(b) if plain(b) else "%%%02x" % b for b in text.encode())


def scalar(value):
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else repr(value)


class Arrays:
    """The arrays of a group, one behind the other, each once, at multiples of 4 bytes."""

    def __init__(self, npz):
        self.npz = npz
        self.blob = bytearray()
        self.places = {}

    def reference(self, array):
        key = (array["array"], array["dtype"])
        if key not in self.places:
            self.places[key] = self.append(self.npz[array["array"]], array["dtype"])
        offset, exponent = self.places[key]
        steps = "" if exponent is None else "/%d" % exponent
        return "@%d:%s%s%s" % (offset, array["dtype"], json.dumps(array["shape"], separators=(",", ":")), steps)

    def append(self, values, dtype):
        self.blob += bytes(-len(self.blob) % 4)
        offset = len(self.blob)
        exponent = None
        if "float" in dtype and values.nbytes >= 4096:
            exponent = steps_of_power_of_two(as_float32(values, dtype))
        if exponent is None:
            self.blob += np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()
        else:
            floats = as_float32(values, dtype)
            negative_zero = np.signbit(floats) & (floats == 0)
            self.blob += np.where(negative_zero, -128, floats * 2.0**exponent).astype(np.int8).tobytes()
        return offset, exponent


def as_float32(values, dtype):
    if dtype == "bfloat16":  # stored as bits
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def steps_of_power_of_two(values):
    """The n for which every value is -127..127 times 2^-n, or None. Long contexts hold such values, and are stored as those
    integers; -128 is -0.0."""
    for n in range(8):
        steps = values.astype(np.float64) * 2.0**n
        if np.array_equal(steps, np.round(steps)):
            return n if np.abs(steps).max() <= 127 else None
    return None


def fields(value, name, arrays):
    """(name, word) of each leaf of a record; dictionaries and lists of them are flattened with dots."""
    if isinstance(value, dict):
        if "array" in value:
            return [(name, arrays.reference(value))]
        if "sha256" in value:
            shape = json.dumps(value["shape"], separators=(",", ":"))
            return [(name, "#%s:%s%s" % (value["sha256"], value["dtype"], shape))]
        return [leaf for key, inner in value.items() for leaf in fields(inner, "%s.%s" % (name, key), arrays)]
    if isinstance(value, list):
        if any(isinstance(inner, (dict, list)) or inner is None for inner in value):
            return [leaf for i, inner in enumerate(value) for leaf in fields(inner, "%s.%d" % (name, i), arrays)]
        return [(name, "[%s]" % ",".join(map(scalar, value)))]
    return [(name, scalar(value))]


def line(word, record, arrays, skip=()):
    leaves = [leaf for key, value in record.items() if key not in skip for leaf in fields(value, key, arrays)]
    return " ".join([word] + ["%s=%s" % leaf for leaf in leaves])


def case_lines(cases, arrays):
    for case in cases:
        yield line("case", case, arrays)


def trace_lines(cases, arrays):
    """A line for each operation, and one for what could be seen after it: of that, what the operation changed."""
    for case in cases:
        yield line("trace", case, arrays, skip=("ops", "final"))
        seen = {}
        for op in case["ops"]:
            yield line(op["op"], op, arrays, skip=("op", "after"))
            if op.get("after") is None:
                continue
            cache = op.get("to", op.get("cache", "c"))
            now = dict(leaf for key, value in op["after"].items() for leaf in fields(value, key, arrays))
            before = seen.get(cache, {})
            changed = ["%s=%s" % leaf for leaf in now.items() if before.get(leaf[0]) != leaf[1]]
            gone = ["-" + name for name in before if name not in now]
            yield " ".join(["after", "cache=" + quoted(cache)] + changed + gone)
            seen[cache] = now
        check_final(case, seen, arrays.npz)


def check_final(case, seen, npz):
    """The arrays at a trace's end are left out, since their hashes stand in the last state seen."""
    digest = lambda array: hashlib.sha256(npz[array["array"]].tobytes()).hexdigest()
    for cache, final in case["final"].items():
        for name, array in final.items():
            if name in ("k", "v"):
                expected = seen[cache]["content.sha256_" + name]
            else:
                expected = seen[cache]["pages.%s.rows_sha256" % name.removesuffix("_rows")]
            if quoted(digest(array)) != expected:
                raise SystemExit("%s: final %s of cache %s is not what was seen last" % (case["id"], name, cache))


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(pathlib.Path, sys.argv[1:])
    for group, lines in (("tables", case_lines), ("traces", trace_lines), ("attention", case_lines)):
        cases = json.loads((source / (group + ".json")).read_text())["cases"]
        npz = source / (group + ".npz")
        arrays = Arrays(np.load(npz)) if npz.exists() else None
        (target / (group + ".txt")).write_text("".join(each + "\n" for each in lines(cases, arrays)))
        if arrays:
            (target / (group + ".bin")).write_bytes(arrays.blob)
    return 0


if __name__ == "__main__":
    sys.exit(main())
