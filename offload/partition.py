"""Divides slabs among ranks: each owns one range of every slab, copies it, and gathers the others from their owners."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from zinfer.nvme.aligned import align_up
from zinfer.offload.block import SLAB_ALIGNMENT_BYTES, Block, Extent, Home, SlabLayout, SlabTensor, Tier
from zinfer.offload.chunks import part_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Partition:
    """The ranges of ``size`` ranks: equal, aligned to 256 bytes, in the order of the ranks.

    The last ranges of a small slab may be shorter than the others, or empty. One rank owns whole slabs.
    """

    rank: int = 0
    size: int = 1

    def range_bytes(self, nbytes: int) -> int:
        """Return the size of one range of a slab of ``nbytes``."""
        return align_up(-(-nbytes // self.size), SLAB_ALIGNMENT_BYTES)

    def gathered_bytes(self, nbytes: int) -> int:
        """Return the size of a slab with all its ranges, the last one filled up."""
        return self.range_bytes(nbytes) * self.size

    def bounds(self, nbytes: int) -> tuple[int, int]:
        """Return the first byte of this rank's range and the one after its last, within a slab of ``nbytes``."""
        each = self.range_bytes(nbytes)
        return min(self.rank * each, nbytes), min((self.rank + 1) * each, nbytes)

    def own_range(self, slab: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Return this rank's range of a slab of ``nbytes`` as a view (uint8)."""
        begin, end = self.bounds(nbytes)
        return slab[begin:end]

    def homed_bytes(self, block: Block, home: Home) -> int:
        """Return the bytes of a block that this rank keeps in its home, or streams from there."""
        begin, end = self.bounds(block.nbytes)
        return end - begin if home.tier is not Tier.DEVICE or home.shared else block.nbytes

    def share_of(self, block: Block) -> Block:
        """Return this rank's range of a block as a block of its own, whose slab begins with the range.

        Checksums are of whole blocks, so the range has none. Blocks with a conversion have no range on disk: their
        slabs are made by one rank and scattered.
        """
        if self.size == 1:
            return block
        import torch

        begin, end = self.bounds(block.nbytes)
        layout = SlabLayout((SlabTensor("range", torch.uint8, (end - begin,)),))
        extents = tuple(cut for extent in block.extents for cut in _clip(extent, begin, end))
        return replace(block, layout=layout, extents=extents, conversion=None, checksum=None)

    def all_reads(self, block: Block) -> list[tuple[Extent, ...]]:
        """Return the extents that each rank reads to fill its range; a block with a conversion is read whole by one."""
        if self.size == 1 or block.conversion is not None:
            return [block.read_extents]
        return [replace(self, rank=rank).share_of(block).extents for rank in range(self.size)]


WHOLE: Final = Partition()
"""One rank, which owns whole slabs."""


def _clip(extent: Extent, begin: int, end: int) -> Iterator[Extent]:
    """Yield the parts of an extent within a slab's bytes ``begin`` to ``end``, with offsets from ``begin``."""
    if extent.rows == 1:
        first = max(extent.slab_offset, begin) - extent.slab_offset
        last = min(extent.slab_offset + extent.slab_nbytes, end) - extent.slab_offset
        if first < last:
            # Bounds are multiples of 256 and elements are aligned, so no element is cut.
            size, slab_size = extent.dtype.itemsize, extent.slab_dtype.itemsize
            cut = part_of(extent, first // slab_size * size, (last - first) // slab_size * size)
            yield replace(cut, slab_offset=cut.slab_offset - begin)
        return
    # Whole runs stay together; one that a bound falls into is cut, at most one at either end.
    pitch, run_bytes = extent.slab_pitch, extent.slab_nbytes // extent.rows
    first = min(max(-(-(begin - extent.slab_offset) // pitch), 0), extent.rows)
    last = min(max((end - extent.slab_offset - run_bytes) // pitch + 1, 0), extent.rows)
    if first < last:
        whole = extent.rows_of(first, last - first)
        yield replace(whole, slab_offset=whole.slab_offset - begin)
    for run in sorted({first - 1, last} & {*range(extent.rows)} - {*range(first, last)}):
        yield from _clip(replace(extent.rows_of(run, 1), pitch=0, slab_pitch=0), begin, end)
