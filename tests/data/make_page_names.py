#!/usr/bin/env python3
"""Prints tests/data/page_names.txt: names of pages by hashlib and PyPI's cbor2 (6.3.0 made the file), as vLLM makes them.

    pip install cbor2 && tests/data/make_page_names.py > tests/data/page_names.txt
"""

import hashlib
import random

import cbor2

KEYS = ("cache_salt", "model", "kv_format", "arithmetic_id")


def sha256_cbor(value):
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def token(seed, index):
    """Any int32, as likely a short one as a long one; tests/core/page_name_test.cpp has the same function."""
    x = (seed * 1000003 + index) * 2654435761 & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 2246822519 & 0xFFFFFFFF
    return (x - (x >> 31 << 32)) >> (x & 31)


def last_name(num_pages, page_size, seed, scope):
    name = sha256_cbor("vllm-none-hash")
    extra = [[key, value] for key, value in zip(KEYS, scope) if value] or None
    for page in range(num_pages):
        tokens = [token(seed, page * page_size + i) for i in range(page_size)]
        name = sha256_cbor([name, tokens, extra])
        extra = None
    return name


def print_chain(num_pages, page_size, seed, *scope):
    scope += ("",) * (len(KEYS) - len(scope))
    print(num_pages, page_size, seed, *(value or "-" for value in scope), last_name(num_pages, page_size, seed, scope).hex())


print("# num_pages page_size seed salt model kv_format arithmetic_id (-: none) -> name of the last page")
print("# Made by make_page_names.py, which says what the tokens are.")
random.seed(0)
for seed in range(20):
    scope = ["".join(random.choices("abcXYZ019äß漢", k=random.choice((0, 0, 1, 9)))) for _ in KEYS]
    print_chain(random.randint(1, 9), random.choice((1, 8, 16, 16, 32, 256)), seed, *scope)
# Where the length of an array or of a text takes more bytes.
for size in (23, 24, 255, 256, 65535, 65536):
    print_chain(2, size, size)
    if size <= 256:
        print_chain(1, 16, size, "s" * size, "m" * size)
