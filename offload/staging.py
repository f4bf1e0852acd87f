"""Staging slots: small buffers that chunks pass on their way to the device.

They are in host memory, pinned for a CUDA device, or in device memory if the reader can fill that.
"""

import queue
from dataclasses import dataclass
from typing import Protocol

import torch

from zinfer.nvme.backend import Buffer
from zinfer.offload.stream import Event


class StagingBuffer(Protocol):
    """A buffer that reads fill through ``memory`` and copies read as ``tensor`` (uint8)."""

    nbytes: int
    tensor: torch.Tensor
    pinned: bool

    @property
    def memory(self) -> Buffer: ...

    def close(self) -> None:
        """Free the memory; no read or copy may be under way."""


class DeviceBuffer:
    """Staging in device memory, for a reader whose backend reads into it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.pinned = False
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # reads are on no stream: earlier uses of this memory must be done

    @property
    def memory(self) -> Buffer:
        return self.tensor

    def close(self) -> None:
        """Do nothing: the memory is freed with the last reference to it."""


@dataclass(eq=False)
class StagingSlot:
    """A buffer for parts; ``reusable_after`` is the event of the last copy from it."""

    memory: StagingBuffer
    reusable_after: Event | None = None


class StagingRing:
    """The free staging slots; `take` blocks the thread that calls it until one is free and drained."""

    def __init__(self) -> None:
        self.slots: list[StagingSlot] = []
        self._free: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()

    def add(self, buffer: StagingBuffer) -> None:
        """Add a buffer of the same size as the others."""
        self.slots.append(StagingSlot(buffer))
        self._free.put(self.slots[-1])

    @property
    def slot_bytes(self) -> int:
        """Size of one slot; 0 without slots."""
        return self.slots[0].memory.nbytes if self.slots else 0

    def take(self) -> StagingSlot:
        slot = self._free.get()
        reusable_after, slot.reusable_after = slot.reusable_after, None
        if reusable_after is not None:
            try:
                reusable_after.synchronize()
            except BaseException:  # the device failed: keep the slot
                self._free.put(slot)
                raise
        return slot

    def put(self, slot: StagingSlot, reusable_after: Event | None) -> None:
        slot.reusable_after = reusable_after
        self._free.put(slot)

    def close(self) -> None:
        """Free the memory; `take` must not be called after. May be called again."""
        for slot in self.slots:
            slot.memory.close()
        self.slots.clear()
        self._free = queue.SimpleQueue()
