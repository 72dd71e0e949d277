"""Pages of many sequences: what an engine builds on."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv import _pagedkv
from pagedkv._arguments import whole
from pagedkv._pagedkv import Batch, BlockTable, LayerSpec
from pagedkv.cache import LayerPages, layer_pages

__all__ = ["Batch", "BlockTable", "LayerGroup", "LayerSpec", "PagePool"]

LayerGroup = tuple[int, Sequence[LayerSpec]]  # sliding window (0: full attention), layers


class PagePool(_pagedkv.PagePool):
    """The pages of a model's keys and values.

    layers: one LayerSpec for each layer, all in one group; or ``groups``: (sliding window, layers) for each set of
    layers whose tokens live equally long. page_size: tokens of a page, 1 to 256. num_pages: of each group before any
    growth. dynamic: grow beyond it. max_bytes: over all groups, 0 for what the machine and its cgroup allow, less
    headroom_bytes. max_pages: of each group, the address space reserved; 0: from max_bytes or memory.

    Every array reserves address space for the most pages it may have: growth moves no byte, and views stay valid.
    ValueError for values outside their limits, PageMemoryError where the first pages do not fit. Threads may call at
    once.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec] = (),
        *,
        groups: Sequence[LayerGroup] = (),
        page_size: int = 16,
        num_pages: int = 1024,
        dynamic: bool = True,
        max_bytes: int = 0,
        headroom_bytes: int = 256 << 20,
        max_pages: int = 0,
    ) -> None:
        if isinstance(layers, LayerSpec):
            layers = [layers]
        if bool(layers) == bool(groups):
            raise ValueError("a pool needs either layers or groups of layers")
        super().__init__(
            [(window, list(specs)) for window, specs in (groups or [(0, layers)])],
            page_size=whole("page_size", page_size, 1, 256),
            num_pages=whole("num_pages", num_pages, 1, 2**31 - 1),
            dynamic=bool(dynamic),
            max_bytes=whole("max_bytes", max_bytes, 0, 2**62),
            headroom_bytes=whole("headroom_bytes", headroom_bytes, 0, 2**62),
            max_pages=whole("max_pages", max_pages, 0, 2**31 - 1),
        )

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<PagePool of {stats['pages_capacity']} pages, {stats['pages_held']} held>"

    def pages(self, layer: int = 0) -> LayerPages:
        """The layer's pages as they lie in memory."""
        return layer_pages(self.views(layer))
