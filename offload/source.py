"""Where slabs come from: one class a home, behind one contract.

A move has two steps. `load` brings the bytes within the device's reach, into a staging slot (blocking; a mover thread
calls it); `send` enqueues the copies into a device slot. A source with ``staging_bytes`` 0 needs only `send`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from zinfer.nvme.aligned import align_up, covering_range
from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, Extent, Tier
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.stream import CopyStream

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


class Source(ABC):
    """How one block's bytes reach a device slot."""

    tier: Tier
    staging_bytes: int
    wire_bytes: int
    """Bytes that cross to the device in one move."""

    @abstractmethod
    def load(self, staging: HostBuffer) -> None:
        """Fill the staging slot and return when it is full."""

    @abstractmethod
    def send(self, stream: CopyStream, target: torch.Tensor, staging: HostBuffer | None) -> None:
        """Enqueue the copies into ``target``, a device slot (uint8)."""


class DiskSource(Source):
    """Reads a block's extents in place from the checkpoint files."""

    tier = Tier.DISK

    def __init__(self, block: Block, reader: Reader) -> None:
        assert block.extents, f"block {block.name} has no bytes on disk"
        self._plan = plan_reads(block.extents)
        self._reader = reader
        self.staging_bytes = self._plan.staging_bytes
        self.wire_bytes = self._plan.wire_bytes

    def load(self, staging: HostBuffer) -> None:
        reads = [
            self._reader.read_async(
                span.file,
                span.offset,
                staging.memory[span.staging_offset : span.staging_offset + span.nbytes],
                span.required,
            )
            for span in self._plan.spans
        ]
        failures = [failure for read in reads if (failure := read.exception()) is not None]
        if failures:  # only now: the buffer must not be reused while another of the reads still fills it
            raise failures[0]

    def send(self, stream: CopyStream, target: torch.Tensor, staging: HostBuffer | None) -> None:
        assert staging is not None
        for part in self._plan.placements:
            source = staging.tensor[part.staging_offset : part.staging_offset + part.nbytes]
            place = target[part.slab_offset : part.slab_offset + part.slab_nbytes]
            if part.dtype == part.slab_dtype:
                stream.copy(place, source)
            else:
                stream.copy(place.view(part.slab_dtype), _typed(source, part.dtype))


def _typed(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as elements; a file may place a tensor at an odd offset, which torch cannot view in place."""
    if source.storage_offset() % dtype.itemsize:
        source = source.clone()
    return source.view(dtype)


class HostSource(Source):
    """A slab in host memory: copied as it lies, or by way of a pinned staging slot when it is pageable."""

    tier = Tier.HOST

    def __init__(self, block: Block, slab: HostBuffer, *, through_staging: bool) -> None:
        self._slab = slab
        self.wire_bytes = block.nbytes
        self.staging_bytes = block.nbytes if through_staging else 0

    def load(self, staging: HostBuffer) -> None:
        staging.tensor[: self.wire_bytes].copy_(self._slab.tensor[: self.wire_bytes])

    def send(self, stream: CopyStream, target: torch.Tensor, staging: HostBuffer | None) -> None:
        buffer = self._slab if staging is None else staging
        stream.copy(target[: self.wire_bytes], buffer.tensor[: self.wire_bytes])
