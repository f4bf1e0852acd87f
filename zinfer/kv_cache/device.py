"""`KVCache`: a paged KV cache on the device, with a swap space for preempted sequences.

[Note: page by page] One array holds the keys of all layers, another the values: page i of layer j is row
i * layers + j, and a layer's own view begins at its first page. So a layer's pages are `stride` rows apart, a page is
copied in one piece, and a range of unused pages is two contiguous ranges of memory.
"""

from collections.abc import Sequence
from typing import Final

import torch

from zinfer.kernels.kv_pages import KVPages
from zinfer.kv_cache.base import PageCache, check_kernels, page_rows
from zinfer.kv_cache.swap import UNLIMITED, SwapPlace, SwapSpace
from zinfer.model.spec import KVShape
from zinfer.sampling.async_copy import send
from zinfer.scheduling.schedule import Chunk

_MOVED_AT_ONCE_BYTES: Final = 64 << 20  # moves need a temporary copy of this size


class KVCache(PageCache):
    """Pages on one device.

    Args:
        shape: of the model's cache.
        num_pages: of each layer.
        page_size: tokens of a page.
        dtype: of keys and values in the pages.
        device: holds the pages.
        swap_place: where to keep pages of preempted sequences.

    Raises:
        ConfigError: the device cannot read pages of this dtype.
        ScratchError: no file for preempted sequences can be made.
    """

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        swap_place: SwapPlace = UNLIMITED,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.stride = shape.num_layers
        self.device = device
        place = (num_pages * self.stride, page_size, shape.num_heads, shape.key_dim, shape.value_dim)
        whole = KVPages.empty(*place, dtype, device, values_in_keys=shape.values_in_keys)
        self._parts = whole.parts()
        self.layers: list[KVPages | None] = [whole.beginning_at(layer) for layer in range(self.stride)]
        check_kernels(whole)
        self.swap_space = SwapSpace(self._rows(), swap_place)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Do nothing: all pages are on the device."""

    def fetch_layer(self, layer: int) -> None:
        """Do nothing."""

    def release_layer(self, layer: int) -> None:
        """Do nothing."""

    def arrive(self) -> None:
        """Do nothing: copies run on the compute stream."""

    def close(self) -> None:
        self.swap_space.close()
        self._parts.clear()
        self.layers[:] = [None] * len(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self._parts)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to others; no page is both a source and a target."""
        at_once = max(1, _MOVED_AT_ONCE_BYTES * self.num_pages // self.nbytes)
        for begin in range(0, len(sources), at_once):
            some = slice(begin, begin + at_once)
            old, new = self._index(sources[some]), self._index(targets[some])
            for part in self._rows():
                part[new] = part[old]

    def memory(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the bytes (uint8) of the pages from ``begin`` up to ``end``, as contiguous ranges."""
        return [part[begin:end].view(torch.uint8).flatten() for part in self._rows()]

    def _rows(self) -> list[torch.Tensor]:
        return [page_rows(part, self.num_pages) for part in self._parts]

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return send(pages, torch.int64, self.device)
