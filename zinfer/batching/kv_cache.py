"""Owns the pages of all layers: keys and values of running sequences on the device, of parked ones in host memory."""

from collections.abc import Sequence

import torch

from zinfer.batching.kv_shape import KVShape
from zinfer.errors import ConfigError
from zinfer.kernels.kv_pages import KVPages, takes_kernels


class KVCache:
    """Pages on one device; page i is page i of every layer.

    Args:
        shape: of the model's cache.
        num_pages: of each layer.
        page_size: tokens of a page.
        dtype: of keys and values in the pages.
        device: where they lie.

    Raises:
        ConfigError: the device cannot read pages of this dtype.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.device = device
        place = (num_pages, page_size, shape.num_heads, shape.key_dim, shape.value_dim)
        self.layers = [KVPages.empty(*place, dtype, device) for _ in range(shape.num_layers)]
        try:
            takes_kernels(self.layers[0])
        except ValueError as error:
            raise ConfigError(f"zinfer.kv_cache_dtype: {error}") from error
        self._parked: dict[int, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def parked_bytes(self) -> int:
        """In host memory."""
        return sum(part.nbytes for parts in self._parked.values() for part in parts)

    def park(self, number: int, pages: Sequence[int]) -> None:
        """Keep what a sequence has in these pages in host memory; they may be written again when this returns."""
        assert number not in self._parked, f"sequence {number} is parked already"
        chosen = self._index(pages)
        self._parked[number] = [_bytes_of(part)[chosen].cpu() for layer in self.layers for part in layer.parts()]

    def resume(self, number: int, pages: Sequence[int]) -> None:
        """Put the last so many pages of what was parked back; those before them were found on the device."""
        parked = iter(self._parked.pop(number))
        if not pages:
            return
        chosen = self._index(pages)
        for layer in self.layers:
            for part in layer.parts():
                _bytes_of(part)[chosen] = next(parked)[-len(pages) :].to(part.device)

    def forget(self, number: int) -> None:
        """Drop what is parked of a sequence that is given up, if anything is."""
        self._parked.pop(number, None)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.layers[0].keys.device)


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: not every dtype of codes can be indexed."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part
