"""Variables as MTPLX reads them: at the moment of each call."""

from __future__ import annotations

import os

_ON = {"1", "true", "yes", "on"}


def env_truthy(name: str, *, default: bool = False) -> bool:
    """Whether the variable is one of 1, true, yes, on (trimmed, any case); the default where it is unset."""
    value = os.environ.get(name)
    return default if value is None else value.strip().lower() in _ON


def env_int(name: str, default: int) -> int:
    """The variable as int() takes it, the default where it is unset or no number; within 2**62 of 0."""
    try:
        return max(-(2**62), min(2**62, int(os.environ.get(name, default))))
    except ValueError:
        return default


def env_strict_int(name: str, default: int) -> int:
    """The same; a blank variable is the default, and one that is no number a ValueError naming it."""
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text}: must be a whole number") from None
