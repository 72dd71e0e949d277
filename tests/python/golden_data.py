"""Reads tests/data/golden (its README.md describes the files) into plain Python values and numpy
arrays."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "data" / "golden"

# How an element is stored: bfloat16 as its bits.
STORED = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "bool": np.dtype("?"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
}


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16. NaN keeps being NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    nan = np.isnan(values)
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def stored_from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to `dtype`, as STORED has them."""
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    return np.asarray(values, np.float32).astype(STORED[dtype])


@dataclass(frozen=True)
class Hash:
    """What an array is known by: SHA-256 of its little-endian bytes in C order, dtype and shape."""

    sha256: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GoldenArray:
    """`stored` has the array's shape; its dtype is STORED[dtype]."""

    dtype: str
    stored: np.ndarray = field(repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    def float32(self) -> np.ndarray:
        """Values as float32, which every floating dtype here fits into."""
        if self.dtype == "bfloat16":
            return (self.stored.astype(np.uint32) << 16).view(np.float32)
        return self.stored.astype(np.float32)

    def tokens(self, begin: int, end: int) -> GoldenArray:
        """Rows [begin, end) of the token axis of [1, heads, tokens, head_dim]."""
        return GoldenArray(self.dtype, self.stored[:, :, begin:end])

    def hash(self) -> Hash:
        data = np.ascontiguousarray(self.stored).astype(STORED[self.dtype]).tobytes()
        return Hash(hashlib.sha256(data).hexdigest(), self.dtype, self.shape)


@dataclass
class Line:
    """A line of a text file: a word and its fields. Values are Python's, GoldenArray or Hash."""

    word: str
    place: str  # "traces.txt:12"
    fields: dict[str, Any]
    gone: list[str]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def under(self, prefix: str) -> dict[str, Any]:
        """Fields "prefix.x" as {"x": value}."""
        start = prefix + "."
        return {k.removeprefix(start): v for k, v in self.fields.items() if k.startswith(start)}


def unquote(word: str) -> str:
    raw = re.sub(rb"%([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), word[1:-1].encode())
    return raw.decode()


def split_list(word: str) -> list[str]:
    return word[1:-1].split(",") if word != "[]" else []


def scalar(word: str) -> Any:
    if word in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[word]
    if word.startswith('"'):
        return unquote(word)
    return int(word) if re.fullmatch(r"-?\d+", word) else float(word)


ARRAY = re.compile(r"@(\d+):(\w+)(\[[\d,]*\])(?:/(\d+))?$")
HASHED = re.compile(r"#([0-9a-f]{64}):(\w+)(\[[\d,]*\])$")


def array(match: re.Match[str], blob: bytes) -> GoldenArray:
    offset, dtype, shape = int(match[1]), match[2], [int(n) for n in split_list(match[3])]
    count = int(np.prod(shape, dtype=np.int64))
    if match[4] is None:
        stored = np.frombuffer(blob, STORED[dtype], count, offset)
    else:
        steps = np.frombuffer(blob, np.int8, count, offset)
        values = np.ldexp(steps.astype(np.float32), -int(match[4])).astype(np.float32)
        stored = stored_from_float32(np.where(steps == -128, np.float32(-0.0), values), dtype)
    return GoldenArray(dtype, stored.reshape(shape))


def value(word: str, blob: bytes) -> Any:
    if match := ARRAY.match(word):
        return array(match, blob)
    if match := HASHED.match(word):
        return Hash(match[1], match[2], tuple(int(n) for n in split_list(match[3])))
    if word.startswith("["):
        return [scalar(item) for item in split_list(word)]
    return scalar(word)


def read_lines(group: str) -> list[Line]:
    """Of "tables", "traces" or "attention"."""
    binary = FOLDER / f"{group}.bin"
    blob = binary.read_bytes() if binary.exists() else b""
    lines = []
    text = (FOLDER / f"{group}.txt").read_text(encoding="ascii")
    for number, each in enumerate(text.splitlines(), start=1):
        word, *rest = each.split(" ")
        fields, gone = {}, []
        for item in rest:
            if item.startswith("-"):
                gone.append(item[1:])
            else:
                name, _, written = item.partition("=")
                fields[name] = value(written, blob)
        lines.append(Line(word, f"{group}.txt:{number}", fields, gone))
    return lines


# ---- quant.bin


@dataclass(frozen=True)
class QuantCase:
    """`codes` are uint8 bytes [rows, packed], `scales` float32 [rows, 1]; hashes are FNV-1a of 64
    bits."""

    name: str
    operation: str  # "roundtrip", "dequantise" or "error"
    error: str = ""
    bits: int = 0
    head_dim: int = 0
    x: GoldenArray | None = None  # [rows, head_dim]
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None
    dequantised: int = 0
    dequantised_in_dtype: int = 0


def fnv1a(data: bytes) -> int:
    state = 0xCBF29CE484222325
    for byte in data:
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return state


def take(file: BinaryIO, dtype: str, shape: Sequence[int]) -> np.ndarray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(file.read(count * kind.itemsize), kind).reshape(shape)


def take_number(file: BinaryIO, dtype: str) -> int:
    return int(take(file, dtype, (1,))[0])


def take_text(file: BinaryIO) -> str:
    return file.read(take_number(file, "u1")).decode()


def take_case(file: BinaryIO, name: str) -> QuantCase:
    operation = ("roundtrip", "dequantise", "error")[take_number(file, "u1")]
    if operation == "error":
        return QuantCase(name, operation, error=take_text(file))
    bits, source = take_number(file, "u1"), take_number(file, "u1")
    rows, head_dim = take_number(file, "<u4"), take_number(file, "<u4")
    x = None
    if source != 3:
        dtype = ("float32", "float16", "bfloat16")[source]
        x = GoldenArray(dtype, take(file, STORED[dtype].str, (rows, head_dim)))
    codes = take(file, "u1", (rows, head_dim * bits // 8))
    scales = take(file, "<f4", (rows, 1))
    dequantised = take_number(file, "<u8")
    in_dtype = take_number(file, "<u8") if x is not None else 0
    return QuantCase(name, operation, "", bits, head_dim, x, codes, scales, dequantised, in_dtype)


def read_quant() -> Iterator[QuantCase]:
    path = FOLDER / "quant.bin"
    end = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < end:
            yield take_case(file, take_text(file))
