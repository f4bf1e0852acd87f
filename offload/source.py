"""Where slabs come from: one class a home, behind one contract.

A move has two steps. `load` brings the bytes within the device's reach, into a staging slot (blocking; a mover thread
calls it); `send` enqueues the copies into a device slot. A source with ``staging_bytes`` 0 needs only `send`.
"""

from abc import ABC, abstractmethod

import torch

from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, Tier
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.read_plan import plan_reads
from zinfer.offload.stream import CopyStream


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
