"""`PageCache`: the interface of the paged KV cache, on the device or in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from zinfer.errors import ConfigError
from zinfer.kernels.kv_pages import KVPages, takes_kernels
from zinfer.kv_cache.swap import SwapSpace
from zinfer.offload.stats import RunStats
from zinfer.scheduling.schedule import Chunk


class PageCache(ABC):
    """Pages of one model; page i is page i of every layer.

    Attributes:
        layers: each layer's view of the pages while the layer computes, in which page i has index i * ``stride``; None
            while it is not on the device. The list object stays the same, so holders see changes.
        bytes_to_device: bytes of pages copied from host memory or disk.
    """

    page_size: int
    num_pages: int
    stride: int
    device: torch.device
    layers: list[KVPages | None]
    swap_space: SwapSpace
    bytes_to_device: int = 0

    @abstractmethod
    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Announce the chunks of the next pass, after all layers of the pass before were launched."""

    @abstractmethod
    def fetch_layer(self, layer: int) -> None:
        """Make later compute wait for a layer's pages on the device; called in the order of layers."""

    @abstractmethod
    def release_layer(self, layer: int) -> None:
        """Note that the layer has computed the whole pass."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for pending write-backs to the pages' home tier."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and files, even if the object is still referenced; idempotent."""

    def add_to(self, stats: RunStats) -> RunStats:
        """Add the counters of the pages to those of a model."""
        written, read = self.swap_space.bytes_written, self.swap_space.bytes_read
        return replace(stats, swapped_bytes_written=written, swapped_bytes_read=read)

    def swap_out(self, number: int, pages: Sequence[int]) -> None:
        """As `SwapSpace.swap_out`, between passes."""
        self.arrive()
        self.swap_space.swap_out(number, pages)

    def swap_in(self, number: int, pages: Sequence[int]) -> None:
        """As `SwapSpace.swap_in`, between passes."""
        self.arrive()
        self.swap_space.swap_in(number, pages)

    def forget(self, number: int) -> None:
        """As `SwapSpace.forget`."""
        self.swap_space.forget(number)


def check_kernels(pages: KVPages) -> None:
    """Raise ConfigError if the device cannot read pages of this dtype."""
    try:
        takes_kernels(pages)
    except ValueError as error:
        raise ConfigError(f"zinfer.kv_cache_dtype: {error}") from error


def page_rows(part: torch.Tensor, num_pages: int) -> torch.Tensor:
    """View a part with one row per page; 1-byte dtypes become uint8, because not all of them can be indexed."""
    return (part.view(torch.uint8) if part.dtype.itemsize == 1 else part).view(num_pages, -1)
