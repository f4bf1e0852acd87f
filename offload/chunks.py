"""Splits the read of a block from disk into chunks: aligned reads into a staging slot, then copies into the slab.

A chunk fits one staging slot, so a block of any size passes through a few small pinned buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_down, align_up, covering_range
from zinfer.offload.block import Extent, dtype_beside

if TYPE_CHECKING:
    import torch

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

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def staging_end(self) -> int:
        return self.staging_offset + self.nbytes


@dataclass(frozen=True)
class Placement:
    """Bytes of a staging slot and their place in a slab; elements are cast when the two dtypes differ.

    Several ``rows`` are runs with pitches, as in `Extent`.
    """

    staging_offset: int
    nbytes: int
    dtype: torch.dtype
    slab_offset: int
    slab_nbytes: int
    slab_dtype: torch.dtype
    rows: int = 1
    pitch: int = 0
    slab_pitch: int = 0

    def source(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the bytes [rows, run] within a staging slot (uint8); [bytes] for one run."""
        return _runs(staging, self.staging_offset, self.nbytes, self.rows, self.pitch)

    def target(self, slab: torch.Tensor) -> torch.Tensor:
        """Return the place within a slab (uint8), likewise."""
        return _runs(slab, self.slab_offset, self.slab_nbytes, self.rows, self.slab_pitch)

    def follows(self, other: Placement) -> bool:
        """Whether one copy can move both."""
        return (
            self.rows == other.rows == 1
            and self.dtype == self.slab_dtype
            and other.dtype == other.slab_dtype
            and self.staging_offset == other.staging_offset + other.nbytes
            and self.slab_offset == other.slab_offset + other.nbytes
        )


@dataclass(frozen=True)
class Chunk:
    """The reads into one staging slot, and the copies from it into the slab."""

    spans: tuple[Span, ...]
    placements: tuple[Placement, ...]

    @property
    def staging_bytes(self) -> int:
        return self.spans[-1].staging_end

    @property
    def wire_bytes(self) -> int:
        return sum(placement.nbytes for placement in self.placements)


def cut_chunks(extents: Sequence[Extent], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cover the extents, in the files' order, with chunks of at most ``chunk_bytes`` (whole pages, two at least).

    Neighbouring extents of a chunk are read by one request. An element that is cast is never split: if it would
    straddle two chunks, its page is read in both.
    """
    assert chunk_bytes % ALIGNMENT_BYTES == 0
    assert chunk_bytes >= 2 * ALIGNMENT_BYTES
    return tuple(_ChunkCutter(chunk_bytes).cut(extents))


@lru_cache(maxsize=1024)
def covered_bytes(extents: tuple[Extent, ...]) -> int:
    """Return the bytes of the aligned reads of the extents, as if they fitted one staging slot.

    Cached, because the search for the best plan calls it many times for the same blocks.
    """
    nbytes = sum(covering_range(extent.offset, extent.span_nbytes)[1] for extent in extents)
    if not nbytes:
        return 0
    return sum(chunk.staging_bytes for chunk in cut_chunks(extents, max(nbytes, 2 * ALIGNMENT_BYTES)))


class _ChunkCutter:
    """Fills one chunk after the other."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._spans: list[Span] = []
        self._placements: list[Placement] = []

    def cut(self, extents: Sequence[Extent]) -> Iterator[Chunk]:
        ordered = sorted(extents, key=lambda extent: (str(extent.file), extent.offset))
        for extent in (part for whole in ordered for part in self._parts(whole)):
            rest: Extent | None = extent if extent.nbytes else None
            while rest is not None:
                taken, rest = self._split(rest)
                if taken is not None:
                    self._add(taken)
                if rest is not None:
                    yield self._finish()
        if self._spans:
            yield self._finish()

    def _parts(self, extent: Extent) -> Iterator[Extent]:
        """Yield an extent whole if its runs are read together with the gaps between them, else each run."""
        run_bytes = extent.nbytes // extent.rows
        if extent.rows == 1 or (
            extent.pitch - run_bytes <= _MERGE_GAP_BYTES and run_bytes + 2 * ALIGNMENT_BYTES <= self._chunk_bytes
        ):
            yield extent
        else:
            for row in range(extent.rows):
                yield replace(extent.rows_of(row, 1), pitch=0, slab_pitch=0)

    def _split(self, extent: Extent) -> tuple[Extent | None, Extent | None]:
        """Return the part of the extent that still fits the chunk, and the rest for the next one."""
        last = self._spans[-1] if self._spans else None
        start, _ = covering_range(extent.offset, extent.span_nbytes)
        if last is not None and self._merges(last, extent.file, start):
            most_end = last.offset + self._chunk_bytes - last.staging_offset
        else:
            most_end = start + self._chunk_bytes - (last.staging_end if last else 0)
        if extent.rows > 1:
            room = most_end - extent.offset - extent.nbytes // extent.rows
            num_rows = min(extent.rows, room // extent.pitch + 1)
            if num_rows < 1:
                return None, extent
            rest = extent.rows_of(num_rows, extent.rows - num_rows) if num_rows < extent.rows else None
            return extent.rows_of(0, num_rows), rest
        nbytes = min(extent.nbytes, most_end - extent.offset)
        if nbytes < extent.nbytes and extent.dtype != extent.slab_dtype:
            nbytes = align_down(max(nbytes, 0), extent.dtype.itemsize)
        if nbytes <= 0:
            return None, extent
        rest = part_of(extent, nbytes, extent.nbytes - nbytes) if nbytes < extent.nbytes else None
        return part_of(extent, 0, nbytes), rest

    def _add(self, extent: Extent) -> None:
        start, nbytes = covering_range(extent.offset, extent.span_nbytes)
        required = extent.offset + extent.span_nbytes - start
        last = self._spans[-1] if self._spans else None
        if last is not None and self._merges(last, extent.file, start):
            required = max(last.required, required + start - last.offset)
            start, staging_offset = last.offset, last.staging_offset
            nbytes = max(last.nbytes, align_up(extent.offset + extent.span_nbytes) - start)
            self._spans.pop()
        else:
            staging_offset = last.staging_end if last else 0
        self._spans.append(Span(extent.file, start, nbytes, required, staging_offset))
        self._place(extent, staging_offset + extent.offset - start)

    @staticmethod
    def _merges(last: Span, file: Path, start: int) -> bool:
        return last.file == file and last.offset <= start <= last.end + _MERGE_GAP_BYTES

    def _place(self, extent: Extent, staging_offset: int) -> None:
        new = Placement(
            *(staging_offset, extent.nbytes, extent.dtype, extent.slab_offset, extent.slab_nbytes, extent.slab_dtype),
            *(extent.rows, extent.pitch, extent.slab_pitch),
        )
        if self._placements and new.follows(self._placements[-1]):
            first = self._placements.pop()
            nbytes = first.nbytes + new.nbytes
            # A merged placement moves raw bytes: the dtypes of its parts may differ from one another.
            raw = dtype_beside(first.dtype, "uint8")
            new = Placement(first.staging_offset, nbytes, raw, first.slab_offset, nbytes, raw)
        self._placements.append(new)

    def _finish(self) -> Chunk:
        chunk = Chunk(tuple(self._spans), tuple(self._placements))
        self._spans, self._placements = [], []
        return chunk


def _runs(memory: torch.Tensor, offset: int, nbytes: int, rows: int, pitch: int) -> torch.Tensor:
    if rows == 1:
        return memory[offset : offset + nbytes]
    return memory[offset:].as_strided((rows, nbytes // rows), (pitch, 1))


def part_of(extent: Extent, begin: int, nbytes: int) -> Extent:
    """Return ``nbytes`` of the extent in its file, from byte ``begin`` on; as uint8 unless its elements are cast."""
    assert extent.rows == 1, "runs are split by `rows_of`"
    offset = extent.offset + begin
    if extent.dtype == extent.slab_dtype:
        raw = dtype_beside(extent.dtype, "uint8")
        return Extent(extent.file, offset, nbytes, raw, extent.slab_offset + begin, raw)
    slab_begin = begin // extent.dtype.itemsize * extent.slab_dtype.itemsize
    return replace(extent, offset=offset, nbytes=nbytes, slab_offset=extent.slab_offset + slab_begin)
