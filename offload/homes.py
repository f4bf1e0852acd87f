"""Fills and owns the slabs that have a home: resident ones on the device, host ones in memory of exact size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

import torch

from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, Home, Tier
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.slots import StagingRing, StagingSlot
from zinfer.offload.source import DiskSource, HostSource, Source
from zinfer.offload.stream import CopyStream, HostStream

NUM_LOADING_BUFFERS: Final = 2
"""Buffers that slabs are filled through: one is read while the other is put in place."""

TakeTensors = Callable[[Block], Mapping[str, torch.Tensor]]
"""Hands over the tensors of a block that came in memory, by name; the giver keeps no reference to them."""


class Homes:
    """The homes of a model's blocks, filled when the constructor returns.

    Args:
        blocks: all blocks in the model's order.
        homes: the home of each, by index.
        reader: reads the checkpoint files, now and while streaming.
        stream: the copy stream of the device.
        take_tensors: where the bytes of blocks without extents come from.

    ``sources`` has the streamed blocks' sources and ``resident`` the other blocks' tensors, by block index.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        homes: Sequence[Home],
        reader: Reader,
        stream: CopyStream,
        take_tensors: TakeTensors | None = None,
    ) -> None:
        self._reader = reader
        self._stream = stream
        self._slabs: dict[int, HostBuffer] = {}
        self.sources: dict[int, Source] = {}
        self.resident: dict[int, dict[str, torch.nn.Parameter]] = {}
        self.device_bytes = 0
        self.bytes_to_device = 0
        try:
            self._settle(blocks, homes, take_tensors)
        except BaseException:
            self.close()
            raise

    @property
    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs.values() if slab.pinned)

    def close(self) -> None:
        """Give the memory back; nothing may be copying from it."""
        self.sources.clear()
        self.resident.clear()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    def _settle(self, blocks: Sequence[Block], homes: Sequence[Home], take_tensors: TakeTensors | None) -> None:
        from_disk: list[tuple[Block, torch.Tensor, CopyStream]] = []
        for block, home in zip(blocks, homes, strict=True):
            if home.tier is Tier.DISK:
                self.sources[block.index] = DiskSource(block, self._reader)
                continue
            target, stream = self._allocate(block, home)
            if block.extents:
                from_disk.append((block, target, stream))
            else:
                assert take_tensors is not None, f"block {block.name} has bytes neither on disk nor in memory"
                self._fill_from_memory(block, target, take_tensors(block))
        self._fill_from_disk(from_disk)

    def _allocate(self, block: Block, home: Home) -> tuple[torch.Tensor, CopyStream]:
        """The memory of one slab, and the stream whose copies fill it."""
        if home.tier is Tier.DEVICE:
            target = self._stream.allocate(block.nbytes)
            self.device_bytes += block.nbytes
            self.resident[block.index] = block.layout.views(target)
            return target, self._stream
        slab = self._slabs[block.index] = HostBuffer(block.nbytes, pin=home.pinned)
        # As planned, also where a registration was refused: there is no staging slot then, and torch copies by itself.
        through_staging = self._stream.needs_pinned and not home.pinned
        self.sources[block.index] = HostSource(block, slab, through_staging=through_staging)
        return slab.tensor, HostStream()

    def _fill_from_memory(self, block: Block, target: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        for tensor in block.layout.tensors:
            tensor.view(target).copy_(tensors[tensor.name])
        if block.index in self.resident:
            self.bytes_to_device += block.nbytes

    def _fill_from_disk(self, jobs: list[tuple[Block, torch.Tensor, CopyStream]]) -> None:
        """Read block after block, one ahead of the one that is put in place."""
        if not jobs:
            return
        sources = [DiskSource(block, self._reader) for block, _, _ in jobs]
        size = max(source.staging_bytes for source in sources)
        # Pageable: these are gone before the first pass, and pinning them would take longer than it saves.
        ring = StagingRing([HostBuffer(size, pin=False) for _ in range(min(NUM_LOADING_BUFFERS, len(jobs)))])
        with closing(ring):
            try:
                for (block, target, stream), source, staging in zip(jobs, sources, _loaded(sources, ring), strict=True):
                    source.send(stream, target, staging.memory)
                    ring.put(staging, stream.mark())
                    if block.index in self.resident:
                        self.bytes_to_device += source.wire_bytes
            finally:
                self._stream.mark().synchronize()


def _loaded(sources: Sequence[Source], ring: StagingRing) -> Iterator[StagingSlot]:
    """The sources' bytes in staging, one read ahead; each slot goes back to the ring when its copies are enqueued."""

    def load(source: Source) -> StagingSlot:
        staging = ring.take()
        source.load(staging.memory)
        return staging

    with ThreadPoolExecutor(1, thread_name_prefix="zinfer-load") as pool:
        ahead = [pool.submit(load, source) for source in sources[:1]]
        for following in [*sources[1:], None]:
            staging = ahead.pop().result()
            if following is not None:
                ahead.append(pool.submit(load, following))
            yield staging
