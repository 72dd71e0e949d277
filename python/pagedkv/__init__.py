"""A paged KV cache for transformer inference.

Keys and values live in pages of a few tokens each: they grow in place without moving a byte, stay quantised, and give
the same bits whichever way a result was reached.

``PagedKVCache`` holds one sequence; ``PagePool``, ``BlockTable`` and ``Batch`` hold many. ``pagedkv.mtplx`` has the names
of MTPLX's Paged KV Cache. ``LLM`` runs GGUF models through the ``pagedkv`` program.
"""

from __future__ import annotations

from pagedkv._pagedkv import (
    VERSION,
    CapacityError,
    PageMemoryError,
    compression_ratio,
    dequantize_symmetric,
    kernel_set,
    num_threads,
    packed_dim,
    quantize_symmetric,
    set_num_threads,
)
from pagedkv.cache import LayerPages, PagedKVCache
from pagedkv.llm import LLM, Completion
from pagedkv.pages import PageView
from pagedkv.pool import Batch, BlockTable, LayerSpec, PagePool

__version__: str = VERSION

__all__ = [
    "LLM",
    "Batch",
    "BlockTable",
    "CapacityError",
    "Completion",
    "LayerPages",
    "LayerSpec",
    "PageMemoryError",
    "PagePool",
    "PageView",
    "PagedKVCache",
    "__version__",
    "compression_ratio",
    "dequantize_symmetric",
    "kernel_set",
    "num_threads",
    "packed_dim",
    "quantize_symmetric",
    "set_num_threads",
]
