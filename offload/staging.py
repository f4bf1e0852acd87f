"""Staging slots: small host buffers, pinned beside a CUDA device, that every chunk on its way to the device passes."""

import queue
from dataclasses import dataclass

from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.stream import Event


@dataclass(eq=False)
class StagingSlot:
    """A page-aligned host buffer that reads land in; ``vacant`` is the copy that last read from it."""

    memory: HostBuffer
    vacant: Event | None = None


class StagingRing:
    """The free staging slots; `take` blocks the thread that calls it until one is free and drained."""

    def __init__(self) -> None:
        self.slots: list[StagingSlot] = []
        self._free: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()

    def add(self, buffer: HostBuffer) -> None:
        """Own one more buffer, as large as the others."""
        self.slots.append(StagingSlot(buffer))
        self._free.put(self.slots[-1])

    @property
    def slot_bytes(self) -> int:
        """Size of one slot, 0 where there is none."""
        return self.slots[0].memory.nbytes if self.slots else 0

    def take(self) -> StagingSlot:
        slot = self._free.get()
        vacant, slot.vacant = slot.vacant, None
        if vacant is not None:
            try:
                vacant.synchronize()
            except BaseException:  # the device failed: the slot is not lost with it
                self._free.put(slot)
                raise
        return slot

    def put(self, slot: StagingSlot, vacant: Event | None) -> None:
        slot.vacant = vacant
        self._free.put(slot)

    def close(self) -> None:
        """Give the memory back; nothing may be taken any more. May be called again."""
        for slot in self.slots:
            slot.memory.close()
        self.slots.clear()
        self._free = queue.SimpleQueue()
