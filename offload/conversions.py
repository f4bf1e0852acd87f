"""Converts blocks that are stored in another form into slabs: while one is converted, the next one is read.

The stored form passes through two slots on the device. The device writes the slab into its home; for a home in host
memory it uses one more device buffer, which is copied there.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch

from zinfer.nvme.reader import Reader
from zinfer.offload.block import NUM_CONVERSION_SLOTS, Block, Conversion
from zinfer.offload.slots import Slot
from zinfer.offload.source import DiskSource
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import TransferLane

TakeTensors: TypeAlias = Callable[[Block], Mapping[str, torch.Tensor]]
"""Returns the tensors of a block whose weights are in memory, by name, and keeps no reference to them."""


@dataclass(frozen=True)
class _UnderWay:
    """A block that is being read. ``ready`` is done when ``home`` may be written."""

    block: Block
    conversion: Conversion
    slot: Slot
    transfer: Transfer | None
    home: torch.Tensor
    ready: "Future[None] | None"


class Conversions:
    """Converts blocks, in the order of `begin`.

    Args:
        blocks: all blocks that may be converted.
        lane: transfers the stored form to the device.
        reader: reads the checkpoint files.
        take_tensors: returns the tensors of blocks whose weights are in memory.
        done: called with each block whose conversion, and copy to its home, is enqueued.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        lane: TransferLane,
        reader: Reader,
        take_tensors: TakeTensors | None = None,
        done: Callable[[Block], None] | None = None,
    ) -> None:
        self._lane = lane
        self._reader = reader
        self._take_tensors = take_tensors
        self._done = done
        self._blocks = blocks
        self._free: deque[Slot] = deque()
        self._scratch: torch.Tensor | None = None
        self._under_way: deque[_UnderWay] = deque()

    def begin(self, block: Block, home: torch.Tensor, ready: "Future[None] | None" = None) -> int:
        """Start to read a block, once a slot is free; returns the bytes to be read from disk.

        Args:
            home: memory for its slab (uint8).
            ready: done when ``home`` may be written; None: at once.

        Raises:
            The error of reading or converting an earlier block.
        """
        conversion = block.conversion
        assert conversion is not None
        if not self._free and not self._under_way:
            self._allocate()
        if not self._free:
            self.finish_oldest()
        slot = self._free.popleft()
        transfer: Transfer | None = None
        if conversion.extents:
            stored = Block(block.index, block.name, conversion.layout, conversion.extents, checksum=block.checksum)
            source = DiskSource(stored, self._reader, self._lane.slot_bytes)
            transfer = Transfer(block.name, source, Target(slot.buffer, self._lane.stream, slot.reusable_after))
        self._under_way.append(_UnderWay(block, conversion, slot, transfer, home, ready))
        if transfer is None:
            assert self._take_tensors is not None, f"block {block.name} has bytes neither on disk nor in memory"
            conversion.layout.fill(slot.buffer, self._take_tensors(block))
            return 0
        self._lane.submit(transfer)
        return transfer.source.wire_bytes

    def finish(self) -> None:
        """Convert the remaining blocks, and free the slots."""
        while self._under_way:
            self.finish_oldest()
        self._free.clear()
        self._scratch = None

    def _allocate(self) -> None:
        conversions = [block.conversion for block in self._blocks if block.conversion]
        nbytes = max(conversion.layout.nbytes for conversion in conversions)
        self._free.extend(Slot.allocate(nbytes, self._lane.stream) for _ in range(NUM_CONVERSION_SLOTS))

    def finish_oldest(self) -> None:
        """Convert the block whose reading began first; the compute stream writes its home."""
        oldest = self._under_way.popleft()
        if oldest.transfer is not None:
            oldest.transfer.raise_failure()
            self._lane.stream.join(oldest.transfer.sent())
        stored = oldest.slot.buffer[: oldest.conversion.layout.nbytes]
        if oldest.ready is not None:
            oldest.ready.result()
        if oldest.home.device == stored.device:
            oldest.conversion.convert(stored, oldest.home)
        else:
            slab = self._scratch_of(oldest.block.nbytes)
            oldest.conversion.convert(stored, slab)
            # On the converting stream, so that the buffer is not overwritten before the copy is done.
            oldest.home.copy_(slab, non_blocking=True)
        oldest.slot.reusable_after = self._lane.stream.mark_compute()
        self._free.append(oldest.slot)
        if self._done is not None:
            self._done(oldest.block)

    def _scratch_of(self, nbytes: int) -> torch.Tensor:
        if self._scratch is None:
            most = max(block.nbytes for block in self._blocks if block.conversion)
            self._scratch = torch.empty(most, dtype=torch.uint8, device=self._lane.stream.device)
        return self._scratch[:nbytes]
