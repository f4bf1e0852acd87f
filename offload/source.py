"""Where slabs are copied from: one class per home.

A transfer consists of parts. `load` starts to copy a part into a staging slot; `send` enqueues its copies into a device
slot. A source that is not ``staged`` sends its parts without loading them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, Tier
from zinfer.offload.block_checksum import BlockChecksum
from zinfer.offload.chunks import cut_chunks
from zinfer.offload.host_memory import MOST_REGISTERED_BYTES, HostBuffer
from zinfer.offload.staging import StagingBuffer
from zinfer.offload.stream import CopyStream


class Source(ABC):
    """How one block's bytes reach a device slot."""

    tier: Tier
    staged: bool
    """Whether the parts pass through staging slots."""
    num_parts: int
    wire_bytes: int
    """Bytes copied to the device in one transfer."""
    read_bytes: int = 0
    """Bytes that one transfer reads from the disk, including the alignment margins before them."""

    @abstractmethod
    def load(self, part: int, staging: StagingBuffer) -> Sequence["Future[None]"]:
        """Start to fill the staging slot; it is full, or may be reused after a failure, when all futures are done."""

    @abstractmethod
    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: StagingBuffer | None) -> None:
        """Enqueue the copies into ``target``, the whole device slot (uint8)."""


class DiskSource(Source):
    """Reads a block's extents in place from the checkpoint files, at most ``chunk_bytes`` a part."""

    tier = Tier.DISK
    staged = True

    def __init__(self, block: Block, reader: Reader, chunk_bytes: int) -> None:
        assert block.extents or not block.nbytes, f"block {block.name} has no bytes on disk"
        self._chunks = cut_chunks(block.extents, chunk_bytes)
        self._checksum = BlockChecksum(block) if block.checksum is not None else None
        self._reader = reader
        self.num_parts = len(self._chunks)
        self.wire_bytes = sum(chunk.wire_bytes for chunk in self._chunks)
        self.read_bytes = sum(span.required for chunk in self._chunks for span in chunk.spans)

    def load(self, part: int, staging: StagingBuffer) -> Sequence["Future[None]"]:
        return [
            self._reader.read_async(
                span.file, span.offset, staging.memory[span.staging_offset : span.staging_end], span.required
            )
            for span in self._chunks[part].spans
        ]

    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: StagingBuffer | None) -> None:
        assert staging is not None
        placements = self._chunks[part].placements
        sources = [piece.source(staging.tensor) for piece in placements]
        if staging.tensor.device.type == "cpu":  # runs cross the link as one; on a device the copy's stream packs them
            sources = [source.contiguous() for source in sources]
        if self._checksum is not None and not self._checksum.is_done:
            self._checksum.add(part, self.num_parts, [source.reshape(-1) for source in sources])
        for piece, source in zip(placements, sources, strict=True):
            place = piece.target(target)
            if piece.dtype == piece.slab_dtype:
                stream.copy(place, source)
            else:
                stream.copy(place.view(piece.slab_dtype), _typed(source, piece.dtype))


def _typed(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; copies them first if they are misaligned, which files allow and torch does not."""
    if source.storage_offset() % dtype.itemsize:
        source = source.clone()
    return source.view(dtype)


class HostSource(Source):
    """A slab in host memory: copied directly, or through pinned staging slots when it is pageable.

    Args:
        part_bytes: size of a staging slot; None copies the slab directly.
    """

    tier = Tier.HOST

    def __init__(self, block: Block, slab: HostBuffer, part_bytes: int | None) -> None:
        self._slab = slab
        self._part_bytes = part_bytes or MOST_REGISTERED_BYTES
        self.staged = part_bytes is not None
        self.wire_bytes = block.nbytes
        self.num_parts = -(-block.nbytes // self._part_bytes)

    def load(self, part: int, staging: StagingBuffer) -> Sequence["Future[None]"]:
        piece = self._slab.tensor[self._range(part)]
        staging.tensor[: piece.nbytes].copy_(piece)
        return ()

    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: StagingBuffer | None) -> None:
        place = target[self._range(part)]
        stream.copy(place, self._slab.tensor[self._range(part)] if staging is None else staging.tensor[: place.nbytes])

    def _range(self, part: int) -> slice:
        return slice(part * self._part_bytes, min((part + 1) * self._part_bytes, self.wire_bytes))


class DeviceSource(Source):
    """A rank's range in device memory: copied into the slot there, so nothing crosses the link.

    Args:
        slab: the range (uint8).
    """

    tier = Tier.DEVICE
    staged = False
    num_parts = 1
    wire_bytes = 0

    def __init__(self, slab: torch.Tensor) -> None:
        self._slab = slab

    def load(self, part: int, staging: StagingBuffer) -> Sequence["Future[None]"]:
        raise AssertionError("a slab on the device passes through no staging slot")

    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: StagingBuffer | None) -> None:
        stream.copy(target, self._slab)


class PeerSource(Source):
    """A slab in the memory of other devices, or in parts on several: copied to its place, between the devices.

    Args:
        parts: of the slab in their order, of one size (uint8).
        own: which of them is on this device; None: none.
        beside: the stream of the copy within the device, which goes on beside those between devices.

    Attributes:
        pulled_bytes: copied from other devices so far.
    """

    tier = Tier.DEVICE
    staged = False
    num_parts = 1
    wire_bytes = 0

    def __init__(self, parts: Sequence[torch.Tensor], own: int | None, beside: CopyStream) -> None:
        self._parts, self._own, self._beside = parts, own, beside
        self.pulled_bytes = 0

    def load(self, part: int, staging: StagingBuffer) -> Sequence["Future[None]"]:
        raise AssertionError("what devices have passes through no staging slot")

    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: StagingBuffer | None) -> None:
        size, each, own = len(self._parts), self._parts[0].nbytes, self._own
        if own is not None:
            self._beside.after(stream.mark())  # the target may be overwritten
            self._beside.copy(target[own * each : (own + 1) * each], self._parts[own])
        others = range(size) if own is None else [(own + step) % size for step in range(1, size)]
        for place in others:  # no two ranks begin with the same one
            stream.copy(target[place * each : (place + 1) * each], self._parts[place])
        if own is not None:
            stream.after(self._beside.mark())
        self.pulled_bytes += len(others) * each
