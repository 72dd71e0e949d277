"""Arguments of C++ types, with errors that name them."""

from __future__ import annotations

import operator
from typing import Any


def whole(name: str, value: Any, least: int, most: int) -> int:
    """An int, numpy's too. TypeError for others, ValueError outside of least..most."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} {value!r}: must be a whole number") from None
    if not least <= number <= most:
        raise ValueError(f"{name} {number}: must be in {least}..{most}")
    return number


def optional_whole(name: str, value: Any, least: int, most: int) -> int | None:
    return None if value is None else whole(name, value, least, most)


def optional_text(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{name} {value!r}: must be text")
