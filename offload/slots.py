"""Device slots: buffers allocated once, each with the event after which it may be overwritten."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from zinfer.nvme.aligned import align_up
from zinfer.offload.block import SLAB_ALIGNMENT_BYTES, SlabLayout
from zinfer.offload.stream import CopyStream, Event


@dataclass(eq=False)
class Slot:
    """A device buffer that any slab fits in.

    ``reusable_after`` is the event of the last use of the bytes: wait for it before overwriting the slot. A block
    loaded into a ``borrowed`` slot is cached there.
    """

    buffer: torch.Tensor
    reusable_after: Event
    borrowed: bool = False
    _views: dict[SlabLayout, dict[str, torch.nn.Parameter]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, nbytes: int, stream: CopyStream) -> "Slot":
        """Allocate a slot of device memory (uint8)."""
        return cls.over(torch.empty(nbytes, dtype=torch.uint8, device=stream.device), stream)

    @classmethod
    def over(cls, buffer: torch.Tensor, stream: CopyStream) -> "Slot":
        """Make a slot of new device memory (uint8).

        torch may return memory that enqueued compute still uses: the slot is reusable after that compute.
        """
        return cls(buffer, stream.mark_compute())

    @classmethod
    def within(cls, memory: torch.Tensor, nbytes: int, stream: CopyStream) -> "list[Slot]":
        """Make as many slots as fit into borrowed device memory (uint8); reusable after the compute so far."""
        first = -memory.data_ptr() % SLAB_ALIGNMENT_BYTES
        begins = range(first, memory.numel() - nbytes + 1, align_up(nbytes, SLAB_ALIGNMENT_BYTES))
        reusable_after = stream.mark_compute()
        return [cls(memory[begin : begin + nbytes], reusable_after, borrowed=True) for begin in begins]

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return self.buffer.data_ptr()

    def views(self, layout: SlabLayout) -> dict[str, torch.nn.Parameter]:
        """Return the slab's tensors over this slot; cached by layout."""
        if layout not in self._views:
            self._views[layout] = layout.views(self.buffer)
        return self._views[layout]


class DeviceSlots:
    """The free device slots, oldest release first.

    First in, first out makes block i use slot i mod n if n divides the number of streamed blocks; otherwise the wrap
    to the next pass causes no stall.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = list(slots)
        self._free = list(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Slot:
        return self._free.pop(0)

    def close(self) -> None:
        """Free all slots; no copy or compute may be under way."""
        self.slots.clear()
        self._free.clear()

    def put(self, slot: Slot) -> None:
        assert slot not in self._free, "a slot was released twice"
        self._free.append(slot)
