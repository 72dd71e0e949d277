"""The words for quantisation modes."""

from __future__ import annotations

from pagedkv import _pagedkv


def normalize_paged_kv_quantization(value: object) -> str:
    """ "off", "q8", "q6" or "q4" for any word that names one (None: off). ValueError naming the word and the modes."""
    return "off" if value is None else _pagedkv.parse_quant_mode(str(value))
