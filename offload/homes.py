"""Fills and owns the slabs of blocks: resident ones on the device, and those in host memory."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Final

import torch

from zinfer.nvme.pool import Pool
from zinfer.nvme.reader import Reader
from zinfer.offload.block import NUM_CONVERSION_SLOTS, Block, Home, Tier
from zinfer.offload.conversions import Conversions, TakeTensors
from zinfer.offload.device_shares import DeviceShares
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.partition import WHOLE
from zinfer.offload.ranks import Ranks
from zinfer.offload.slots import Slot
from zinfer.offload.source import DeviceSource, DiskSource, HostSource, Source
from zinfer.offload.stream import HostStream, drain
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import TransferLane

_NUM_COPIERS: Final = 2  # one copies 6 GB/s at best, and half of that beside reads and touches; four are no faster


class Homes:
    """The homes of a model's blocks, filled when the constructor returns.

    Three things overlap: the lanes fill one slab, this thread faults in the pages of the next ones, and a third thread
    pins those already faulted in.

    Args:
        blocks: all blocks in the model's order.
        homes: the home of each, by index.
        reader: reads the checkpoint files, now and while streaming.
        lanes: read from disk; that of HOST into host slabs, that of DISK to the device.
        take_tensors: returns the tensors of blocks without extents.
        ranks: the others that the model is shared with; each has its range of every shared slab.
        pulls: whether they copy ranges from each other's devices, which hold all that is shared.

    ``sources`` has the streamed blocks' sources and ``resident`` the other blocks' tensors, by block index;
    ``loaded_bytes`` were read from disk, in ``load_s`` seconds.

    Raises:
        DiskReadError: a read failed. This or any other error frees all memory.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        homes: Sequence[Home],
        reader: Reader,
        lanes: Mapping[Tier, TransferLane],
        take_tensors: TakeTensors | None = None,
        ranks: Ranks | None = None,
        *,
        pulls: bool = False,
    ) -> None:
        self._ranks = ranks
        self._shares: DeviceShares | None = None
        self._partition = WHOLE if ranks is None else ranks.partition
        self._scattered: list[tuple[Block, torch.Tensor]] = []
        self._gathered: list[tuple[Block, Slot]] = []
        self._reader = reader
        self._lanes = lanes
        self._stream = lanes[Tier.DISK].stream
        self._take_tensors = take_tensors
        self._slabs: list[HostBuffer] = []
        self._pinned: list[Future[None]] = []
        self._transfers: list[Transfer] = []
        self._conversions = Conversions(blocks, lanes[Tier.DISK], reader, take_tensors)
        self.sources: dict[int, Source] = {}
        self.resident: dict[int, dict[str, torch.nn.Parameter]] = {}
        self.device_bytes = 0
        self.bytes_to_device = 0
        self.loaded_bytes = 0
        begin_s = time.perf_counter()
        if pulls:
            assert ranks is not None
            self._shares = DeviceShares(
                [block for block, home in zip(blocks, homes, strict=True) if home.shared], ranks
            )
        with closing(Pool(1, "zinfer-pin")) as self._pins, closing(Pool(_NUM_COPIERS, "zinfer-copy")) as copiers:
            self._into_host = HostStream(copiers)
            try:
                for block, home in zip(blocks, homes, strict=True):
                    self._place(block, home)
                    self._raise_early_failure()
                self._wait()
            except BaseException:
                for lane in lanes.values():
                    lane.close()
                for lane in lanes.values():
                    drain(lane.stream)  # copies under way write into the slabs, and read staging
                self._pins.close()
                self.close()
                raise
        self.load_s = time.perf_counter() - begin_s

    @property
    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs if slab.pinned)

    def close(self) -> None:
        """Free the memory; no copy from it may be under way."""
        self.sources.clear()
        self.resident.clear()
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()

    def _place(self, block: Block, home: Home) -> None:
        """Allocate a block's home and start to fill it."""
        share = self._partition.share_of(block)
        if home.tier is Tier.DISK:
            self.sources[block.index] = self._disk_source(share, Tier.DISK)
        elif home.tier is Tier.HOST:
            self._place_on_host(block, share, home)
        elif home.shared and self._shares is not None:
            self._place_among_devices(block, share, self._shares)
        elif home.shared:
            slab = Slot.allocate(share.nbytes, self._stream)
            self.device_bytes += share.nbytes
            self.sources[block.index] = DeviceSource(slab.buffer)
            self._fill_on_device(block, share, slab, slab.buffer)
        else:
            slot = Slot.allocate(self._partition.gathered_bytes(block.nbytes), self._stream)
            self.device_bytes += slot.buffer.nbytes
            self.resident[block.index] = slot.views(block.layout)
            self._fill_on_device(block, share, slot, self._partition.own_range(slot.buffer, block.nbytes))
            if self._ranks is not None:
                self._gathered.append((block, slot))

    def _place_among_devices(self, block: Block, share: Block, shares: DeviceShares) -> None:
        """Fill what this rank keeps of a block that all ranks copy from each other's devices."""
        own, source = shares.own(block), shares.source(block, self._stream)
        if source is not None:
            self.sources[block.index] = source
        if own is None:
            self._let_go(block)
            return
        self.device_bytes += own.nbytes
        slot = Slot.over(own, self._stream)
        if source is not None:
            self._fill_on_device(block, share, slot, own)
            return
        self.resident[block.index] = slot.views(block.layout)
        if block.conversion is None:
            self._fill(block, block, Target(own, self._stream, slot.reusable_after), Tier.DISK)
            self.bytes_to_device += block.nbytes
        else:
            self.loaded_bytes += self._conversions.begin(block, own)
            self.bytes_to_device += block.conversion.layout.nbytes

    def _let_go(self, block: Block) -> None:
        """Free a block's weights in memory, which another rank keeps."""
        stored = block.extents if block.conversion is None else block.conversion.extents
        if not stored and self._take_tensors is not None:
            self._take_tensors(block)

    def _fill_on_device(self, block: Block, share: Block, slot: Slot, place: torch.Tensor) -> None:
        """Start to fill ``place``, this rank's range of a block, within a slot."""
        if block.conversion is None:
            self._fill(block, share, Target(place, self._stream, slot.reusable_after), Tier.DISK)
            self.bytes_to_device += share.nbytes
        else:
            self._convert(block, place)

    def _place_on_host(self, block: Block, share: Block, home: Home) -> None:
        slab = HostBuffer(share.nbytes)
        self._slabs.append(slab)
        # As planned, even if pinning fails later: without staging slots torch copies pageable memory itself.
        part_bytes = self._lanes[Tier.HOST].slot_bytes if self._stream.needs_pinned and not home.pinned else None
        self.sources[block.index] = HostSource(share, slab, part_bytes)
        if block.conversion is None:
            self._fill(block, share, Target(slab.tensor, self._into_host), Tier.HOST)
        slab.touch()  # faster than the disk, so pages are there before their bytes
        if home.pinned:
            self._pinned.append(self._pins.submit(slab.pin))
        if block.conversion is not None:
            self._convert(block, slab.tensor[: share.nbytes], self._pinned[-1] if home.pinned else None)

    def _fill(self, block: Block, share: Block, target: Target, tier: Tier) -> None:
        """Submit the fill to the lane of a tier, or copy weights that are in memory."""
        if block.extents:
            self._transfers.append(Transfer(block.name, self._disk_source(share, tier), target))
            self._lanes[tier].submit(self._transfers[-1])
            self.loaded_bytes += self._transfers[-1].source.wire_bytes
            return
        assert self._take_tensors is not None, f"block {block.name} has bytes neither on disk nor in memory"
        if self._ranks is None or share is block:
            block.layout.fill(target.memory, self._take_tensors(block))
            return
        slab = torch.empty(block.nbytes, dtype=torch.uint8)
        block.layout.fill(slab, self._take_tensors(block))
        own = self._partition.own_range(slab, block.nbytes)
        target.memory[: own.nbytes].copy_(own)

    def _convert(self, block: Block, home: torch.Tensor, ready: "Future[None] | None" = None) -> None:
        assert block.conversion is not None
        if self._ranks is not None:
            self._scattered.append((block, home))
            return
        self.loaded_bytes += self._conversions.begin(block, home, ready)
        self.bytes_to_device += block.conversion.layout.nbytes

    def _convert_and_scatter(self, ranks: Ranks) -> None:
        """Fill this rank's range of converted blocks: each rank converts whole blocks in turn and scatters them."""
        size, rank, whole = self._partition.size, self._partition.rank, self._partition.gathered_bytes
        several = [block for block, _ in self._scattered]
        if not several:
            return
        self._conversions.finish()  # of blocks that are this rank's as a whole
        own, num_begun = several[rank::size], 0
        slab = torch.empty(max(whole(block.nbytes) for block in several), dtype=torch.uint8, device=self._stream.device)
        part = torch.empty(len(slab) // size, dtype=torch.uint8, device=self._stream.device)
        for number, (block, home) in enumerate(self._scattered):
            # One more is read while this one is converted.
            for each in own[num_begun : number // size + NUM_CONVERSION_SLOTS]:
                assert each.conversion is not None
                self.loaded_bytes += self._conversions.begin(each, slab[: each.nbytes])
                self.bytes_to_device += each.conversion.layout.nbytes
                num_begun += 1
            is_own = number % size == rank
            if is_own:
                self._conversions.finish_oldest()
            else:
                self._let_go(block)
            each_bytes = self._partition.range_bytes(block.nbytes)
            ranks.scatter(part[:each_bytes], slab[: whole(block.nbytes)] if is_own else None, number % size)
            home.copy_(part[: home.nbytes])
        self._scattered.clear()

    def _disk_source(self, block: Block, tier: Tier) -> DiskSource:
        return DiskSource(block, self._reader, self._lanes[tier].slot_bytes)

    def _raise_early_failure(self) -> None:
        while self._transfers and self._transfers[0].is_over:
            self._transfers.pop(0).raise_failure()

    def _wait(self) -> None:
        if self._ranks is not None:
            self._convert_and_scatter(self._ranks)
        self._conversions.finish()
        while self._transfers:
            self._transfers.pop(0).raise_failure()
        for pinned in self._pinned:
            pinned.result()
        self._stream.mark().synchronize()
        self._stream.mark_compute().synchronize()  # conversions write slabs by the compute stream
        if self._ranks is not None:
            for block, slot in self._gathered:
                self._ranks.gather(slot.buffer[: self._partition.gathered_bytes(block.nbytes)])
            self._gathered.clear()
            self._stream.mark_compute().synchronize()
