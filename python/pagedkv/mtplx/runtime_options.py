"""The words for quantisation modes."""

from __future__ import annotations

from pagedkv import _pagedkv


def normalize_paged_kv_quantization(value: object, *, allow_none: bool = False) -> str | None:
    """ "off", "q8", "q6" or "q4" for any word that names one. None is "off", or stays None with allow_none. ValueError
    naming the word and the modes for others."""
    if value is None:
        return None if allow_none else "off"
    return _pagedkv.parse_quant_mode(str(value))
