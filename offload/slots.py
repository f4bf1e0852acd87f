"""Slots: buffers allocated once, each travelling with the event after which it may be overwritten."""

import queue
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from zinfer.offload.block import SlabLayout
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.stream import Event


@dataclass(eq=False)
class Slot:
    """A device buffer that any slab fits in.

    ``vacant`` is the event of the last reader of the bytes: whoever overwrites the slot waits for it first.
    """

    index: int
    buffer: torch.Tensor
    vacant: Event | None = None
    _views: dict[SlabLayout, dict[str, torch.nn.Parameter]] = field(default_factory=dict)

    def views(self, layout: SlabLayout) -> dict[str, torch.nn.Parameter]:
        """The slab's tensors over this slot, made once a layout."""
        if layout not in self._views:
            self._views[layout] = layout.views(self.buffer)
        return self._views[layout]


@dataclass(eq=False)
class StagingSlot:
    """A page-aligned host buffer that disk reads land in; ``vacant`` is the copy that last read from it."""

    memory: HostBuffer
    vacant: Event | None = None


class DeviceSlots:
    """The free device slots, oldest release first.

    First in, first out makes block i use slot i mod n where n divides the number of streamed blocks, and costs no
    stall at the wrap where it does not.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self.slots = [Slot(index, buffer) for index, buffer in enumerate(buffers)]
        self._free = list(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Slot:
        return self._free.pop(0)

    def reclaim(self, used: Iterable[Slot]) -> None:
        """Free every slot that is neither free nor ``used``."""
        busy = [*used, *self._free]
        self._free += [slot for slot in self.slots if slot not in busy]

    def put(self, slot: Slot) -> None:
        assert slot not in self._free, f"slot {slot.index} was released twice"
        self._free.append(slot)


class StagingRing:
    """The free staging slots; ``take`` blocks the mover thread that calls it until one is free and drained."""

    def __init__(self, buffers: Iterable[HostBuffer]) -> None:
        self.slots = [StagingSlot(buffer) for buffer in buffers]
        self._free: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)

    def take(self) -> StagingSlot:
        slot = self._free.get()
        if slot.vacant is not None:
            slot.vacant.synchronize()
        return slot

    def put(self, slot: StagingSlot, vacant: Event | None) -> None:
        slot.vacant = vacant
        self._free.put(slot)

    def close(self) -> None:
        for slot in self.slots:
            slot.memory.close()
