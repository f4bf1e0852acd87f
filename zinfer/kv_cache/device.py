"""Owns the pages of all layers: keys and values of running sequences on the device; `swap_space` has those of preempted
ones.

[Note: page by page] A page's keys lie beside each other for all layers, and so do its values: page i of layer j is
number i * layers + j of one array, and a layer's own view of the array begins at its first page. So a layer's pages lie
`stride` numbers apart, a page moves in one piece, and pages that nobody needs are two whole ranges of memory.
"""

from collections.abc import Sequence
from typing import Final

import torch

from zinfer.kernels.kv_pages import KVPages
from zinfer.kv_cache.base import PageCache, check_kernels, page_rows
from zinfer.kv_cache.swap import UNLIMITED, SwapPlace, SwapSpace
from zinfer.model.spec import KVShape
from zinfer.scheduling.schedule import Chunk

_MOVED_AT_ONCE_BYTES: Final = 1 << 30  # what moves on the device is copied twice


class KVCache(PageCache):
    """Pages on one device.

    Args:
        shape: of the model's cache.
        num_pages: of each layer.
        page_size: tokens of a page.
        dtype: of keys and values in the pages.
        device: where they lie.
        swap_place: where pages of preempted sequences are kept.

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
        """Nothing has to come."""

    def fetch_layer(self, layer: int) -> None:
        """They are there."""

    def release_layer(self, layer: int) -> None:
        """They stay."""

    def arrive(self) -> None:
        """They are copied in the order of the compute."""

    def close(self) -> None:
        self.swap_space.close()
        self._parts.clear()
        self.layers[:] = [None] * len(self.layers)

    @property
    def nbytes(self) -> int:
        """On the device."""
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
        """The bytes (uint8) of the pages from ``begin`` up to ``end``, in ranges."""
        return [part[begin:end].view(torch.uint8).flatten() for part in self._rows()]

    def _rows(self) -> list[torch.Tensor]:
        return [page_rows(part, self.num_pages) for part in self._parts]

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.device)
