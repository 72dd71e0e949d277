"""What an attention call is for, as a context: counters are kept by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VALID_ATTENTION_PHASES = frozenset(
    {"prefill", "decode_verify", "ar_decode", "postcommit", "unknown"}
)

_phase: ContextVar[str] = ContextVar("pagedkv_attention_phase", default="unknown")


def normalize_attention_phase(phase: str | None) -> str:
    """One of VALID_ATTENTION_PHASES (trimmed, any case); "unknown" for everything else."""
    word = (phase or "unknown").strip().lower()
    return word if word in VALID_ATTENTION_PHASES else "unknown"


def current_attention_phase() -> str:
    return _phase.get()


@contextmanager
def attention_phase(phase: str | None) -> Iterator[None]:
    """Calls inside count for this phase."""
    token = _phase.set(normalize_attention_phase(phase))
    try:
        yield
    finally:
        _phase.reset(token)
