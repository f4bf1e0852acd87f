"""Device slots: buffers allocated once, each travelling with the event after which it may be overwritten."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from zinfer.nvme.aligned import align_up
from zinfer.offload.block import SLAB_ALIGNMENT_BYTES, SlabLayout
from zinfer.offload.stream import CopyStream, Event


@dataclass(eq=False)
class Slot:
    """A device buffer that any slab fits in.

    ``reusable_after`` is the event of the last reader of the bytes: wait for it before overwriting the slot. A
    block that is moved into a ``borrowed`` slot stays there.
    """

    buffer: torch.Tensor
    reusable_after: Event
    borrowed: bool = False
    _views: dict[SlabLayout, dict[str, torch.nn.Parameter]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, nbytes: int, stream: CopyStream) -> "Slot":
        """Device memory (uint8) for copies to fill.

        torch may hand out memory that compute, enqueued before, still uses: the slot is vacant after that.
        """
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=stream.device)
        return cls(buffer, stream.mark_compute())

    @classmethod
    def within(cls, memory: torch.Tensor, nbytes: int, stream: CopyStream) -> "list[Slot]":
        """Slots in device memory (uint8) of someone else, as many as it holds; vacant likewise."""
        first = -memory.data_ptr() % SLAB_ALIGNMENT_BYTES
        begins = range(first, memory.numel() - nbytes + 1, align_up(nbytes, SLAB_ALIGNMENT_BYTES))
        reusable_after = stream.mark_compute()
        return [cls(memory[begin : begin + nbytes], reusable_after, borrowed=True) for begin in begins]

    @property
    def address(self) -> int:
        """Where its bytes begin."""
        return self.buffer.data_ptr()

    def views(self, layout: SlabLayout) -> dict[str, torch.nn.Parameter]:
        """The slab's tensors over this slot, made once a layout."""
        if layout not in self._views:
            self._views[layout] = layout.views(self.buffer)
        return self._views[layout]


class DeviceSlots:
    """The free device slots, oldest release first.

    First in, first out makes block i use slot i mod n where n divides the number of streamed blocks, and costs no
    stall at the wrap where it does not.
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
        """Let go of all of them; nothing may be copying or computing any more."""
        self.slots.clear()
        self._free.clear()

    def put(self, slot: Slot) -> None:
        assert slot not in self._free, "a slot was released twice"
        self._free.append(slot)
