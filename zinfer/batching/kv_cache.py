"""Owns the pages of all layers: keys and values of running sequences on the device, of parked ones in host memory.

[Note: page by page] A page's keys lie beside each other for all layers, and so do its values: page i of layer j is
number i * layers + j of one array, and a layer's own view of the array begins at its first page. So a layer's pages lie
`stride` numbers apart, a page moves in one piece, and pages that nobody needs are two whole ranges of memory.
"""

from collections.abc import Sequence
from typing import Final

import torch

from zinfer.batching.kv_shape import KVShape
from zinfer.errors import ConfigError
from zinfer.kernels.kv_pages import KVPages, takes_kernels

_MOVED_AT_ONCE_BYTES: Final = 1 << 30  # what moves on the device is copied twice


class KVCache:
    """Pages on one device; page i is page i of every layer.

    Args:
        shape: of the model's cache.
        num_pages: of each layer.
        page_size: tokens of a page.
        dtype: of keys and values in the pages.
        device: where they lie.

    ``layers`` has each layer's view of the pages, in which page i is number i * ``stride``.

    Raises:
        ConfigError: the device cannot read pages of this dtype.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.stride = shape.num_layers
        self.device = device
        place = (num_pages * self.stride, page_size, shape.num_heads, shape.key_dim, shape.value_dim)
        self._whole = KVPages.empty(*place, dtype, device, values_in_keys=shape.values_in_keys)
        self.layers = [self._whole.beginning_at(layer) for layer in range(self.stride)]
        try:
            takes_kernels(self._whole)
        except ValueError as error:
            raise ConfigError(f"zinfer.kv_cache_dtype: {error}") from error
        self._parked: dict[int, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._whole.nbytes

    def park(self, number: int, pages: Sequence[int]) -> None:
        """Keep what a sequence has in these pages in host memory; they may be written again when this returns."""
        assert number not in self._parked, f"sequence {number} is parked already"
        chosen = self._index(pages)
        self._parked[number] = [part[chosen].cpu() for part in self._rows()]

    def resume(self, number: int, pages: Sequence[int]) -> None:
        """Put the last so many pages of what was parked back; those before them were found on the device."""
        parked = self._parked.pop(number)
        if not pages:
            return
        chosen = self._index(pages)
        for part, kept in zip(self._rows(), parked, strict=True):
            part[chosen] = kept[-len(pages) :].to(part.device)

    def forget(self, number: int) -> None:
        """Drop what is parked of a sequence that is given up, if anything is."""
        self._parked.pop(number, None)

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
        """The parts with one row a page, as integers where not every dtype of codes can be indexed."""
        bits = (part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in self._whole.parts())
        return [part.view(self.num_pages, -1) for part in bits]

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.device)
