"""How a block's bytes on disk become a slab: aligned reads into a staging slot, then copies to their places."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from zinfer.nvme.aligned import align_up, covering_range
from zinfer.offload.block import Extent

# Reading over a gap of this size costs less than another request (64 KiB at 4 GB/s: 16 us).
_MERGE_GAP_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Span:
    """An aligned range of a file and its place in a staging slot; the first ``required`` bytes must exist."""

    file: Path
    offset: int
    nbytes: int
    required: int
    staging_offset: int


@dataclass(frozen=True)
class Placement:
    """Bytes of a staging slot and their place in a slab; elements are cast when the two dtypes differ."""

    staging_offset: int
    nbytes: int
    dtype: torch.dtype
    slab_offset: int
    slab_nbytes: int
    slab_dtype: torch.dtype

    def follows(self, other: "Placement") -> bool:
        """Whether one copy can move both."""
        return (
            self.dtype == self.slab_dtype
            and other.dtype == other.slab_dtype
            and self.staging_offset == other.staging_offset + other.nbytes
            and self.slab_offset == other.slab_offset + other.nbytes
        )


@dataclass(frozen=True)
class ReadPlan:
    """The reads that bring a block's extents into staging, and the copies that put them in their places."""

    spans: tuple[Span, ...]
    placements: tuple[Placement, ...]

    @property
    def staging_bytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def wire_bytes(self) -> int:
        return sum(placement.nbytes for placement in self.placements)


def plan_reads(extents: Sequence[Extent]) -> ReadPlan:
    """Cover the extents with as few aligned ranges as neighbourhood in the files allows."""
    spans: list[Span] = []
    placements: list[Placement] = []
    for extent in sorted(extents, key=lambda extent: (str(extent.file), extent.offset)):
        start, nbytes = covering_range(extent.offset, extent.nbytes)
        last = spans[-1] if spans else None
        if last and last.file == extent.file and start <= last.offset + last.nbytes + _MERGE_GAP_BYTES:
            start, staging_offset = last.offset, last.staging_offset
            nbytes = max(last.nbytes, align_up(extent.offset + extent.nbytes) - start)
            spans.pop()
        else:
            staging_offset = last.staging_offset + last.nbytes if last else 0
        required = extent.offset + extent.nbytes - start
        spans.append(Span(extent.file, start, nbytes, required, staging_offset))
        _append_merged(placements, _placement(extent, staging_offset + extent.offset - start))
    return ReadPlan(tuple(spans), tuple(placements))


def _placement(extent: Extent, staging_offset: int) -> Placement:
    return Placement(
        staging_offset, extent.nbytes, extent.dtype, extent.slab_offset, extent.slab_nbytes, extent.slab_dtype
    )


def _append_merged(placements: list[Placement], new: Placement) -> None:
    if placements and new.follows(placements[-1]):
        first = placements.pop()
        nbytes = first.nbytes + new.nbytes
        # A merged placement moves raw bytes: the dtypes of its parts may differ from one another.
        new = Placement(first.staging_offset, nbytes, torch.uint8, first.slab_offset, nbytes, torch.uint8)
    placements.append(new)
