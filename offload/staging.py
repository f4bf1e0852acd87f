"""Staging slots: small buffers that every chunk on its way to the device passes.

They lie in host memory, pinned beside a CUDA device; or on the device, where reads can land there.
"""

import queue
from dataclasses import dataclass
from typing import Protocol

import torch

from zinfer.nvme.backend import Buffer
from zinfer.offload.stream import Event


class StagingBuffer(Protocol):
    """Bytes that reads fill through ``memory`` and copies see as ``tensor`` (uint8)."""

    nbytes: int
    tensor: torch.Tensor
    pinned: bool

    @property
    def memory(self) -> Buffer: ...

    def close(self) -> None:
        """Give the memory back; nothing may be reading or writing it."""


class DeviceBuffer:
    """Staging in device memory, for a reader whose backend fills it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.pinned = False
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # reads follow no stream: whatever used this memory before must be over

    @property
    def memory(self) -> Buffer:
        return self.tensor

    def close(self) -> None:
        """Nothing to do: the memory goes with the last reference to it."""


@dataclass(eq=False)
class StagingSlot:
    """A buffer that parts land in; ``reusable_after`` is the copy that last read from it."""

    memory: StagingBuffer
    reusable_after: Event | None = None


class StagingRing:
    """The free staging slots; `take` blocks the thread that calls it until one is free and drained."""

    def __init__(self) -> None:
        self.slots: list[StagingSlot] = []
        self._free: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()

    def add(self, buffer: StagingBuffer) -> None:
        """Own one more buffer, as large as the others."""
        self.slots.append(StagingSlot(buffer))
        self._free.put(self.slots[-1])

    @property
    def slot_bytes(self) -> int:
        """Size of one slot, 0 where there is none."""
        return self.slots[0].memory.nbytes if self.slots else 0

    def take(self) -> StagingSlot:
        slot = self._free.get()
        reusable_after, slot.reusable_after = slot.reusable_after, None
        if reusable_after is not None:
            try:
                reusable_after.synchronize()
            except BaseException:  # the device failed: the slot is not lost with it
                self._free.put(slot)
                raise
        return slot

    def put(self, slot: StagingSlot, reusable_after: Event | None) -> None:
        slot.reusable_after = reusable_after
        self._free.put(slot)

    def close(self) -> None:
        """Give the memory back; nothing may be taken any more. May be called again."""
        for slot in self.slots:
            slot.memory.close()
        self.slots.clear()
        self._free = queue.SimpleQueue()
