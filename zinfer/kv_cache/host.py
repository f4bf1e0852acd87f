"""`HostedKVCache`: a paged KV cache in host memory; a layer's pages are copied to a device slot while it computes.

[Note: layer by layer] All pages of a layer are contiguous, in host memory and in a slot. Page i has the same index in
both, so that page tables hold for either, and a run of pages is one copy per tensor.

[Note: lifetime of a slot of pages] A slot is free, filling or held, and has an event ``reusable_after``. A layer's
pages are copied into the slot that was freed first, after that event. By then the slot's former contents are back in
host memory, and so are the layer's own pages of the pass before: there are no more slots than layers, and all copies
back are on one stream, in the order of layers. `fetch_layer` makes compute wait for the copies to the device, which are
on another stream (held). `release_layer` enqueues the copies of the written pages back to host memory, after the
compute so far, and frees the slot with the event of the last copy as its ``reusable_after``. So the host waits for
nothing, and a pass may start while the one before is still computed.

The thread that runs the model enqueues the few copies itself. A pass that is interrupted, by Ctrl-C at any line, leaves
pages that are never found again, and a slot that is not free. `expect` detects that and waits for all copies and
compute before it frees the slots.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from zinfer.errors import PlanError
from zinfer.kernels.kv_pages import KVPages
from zinfer.kv_cache.base import PageCache, check_kernels, page_rows
from zinfer.kv_cache.swap import UNLIMITED, SwapPlace, SwapSpace
from zinfer.kv_cache.transfers import PageTraffic, find_traffic
from zinfer.model.spec import KVShape
from zinfer.offload.host_memory import MOST_REGISTERED_BYTES, HostBuffer
from zinfer.offload.stats import RunStats
from zinfer.offload.stream import CopyStream, Event, open_stream
from zinfer.offload.trace import Trace
from zinfer.scheduling.schedule import Chunk
from zinfer.units import human_bytes

log = logging.getLogger(__name__)

_GAP_BYTES: Final = 256 << 10  # 5 to 10 us of a link: the time to enqueue a separate copy


@dataclass(eq=False)
class _Slot:
    """Device memory for one layer's pages; see [Note: lifetime of a slot of pages]."""

    pages: KVPages
    reusable_after: Event
    filled: Event
    parts: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = self.pages.parts()


class HostedKVCache(PageCache):
    """Pages in host memory, pinned beside a CUDA device.

    Args:
        shape: of the model's cache.
        num_pages: of each layer.
        page_size: tokens of a page.
        dtype: of keys and values in the pages.
        device: computes with them.
        swap_place: where to keep pages of preempted sequences.
        windows: of each layer, the positions that a token attends to, its own included; None: all before it.
        synchronous: wait for every copy, and prefetch none.
        open_stream: makes copy streams for the device.
        gap_bytes: largest gap between two pages, in bytes of one tensor, that is copied along with them.
        trace: records copies.

    ``bytes_to_host`` counts the bytes copied back.

    Raises:
        ConfigError: the device cannot read pages of this dtype.
        PlanError: the pages of a layer exceed one registration of pinned memory.
        ScratchError: no file for preempted sequences can be made.
    """

    stride = 1

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        swap_place: SwapPlace = UNLIMITED,
        *,
        windows: Sequence[int | None] | None = None,
        synchronous: bool = False,
        open_stream: Callable[[torch.device], CopyStream] = open_stream,
        gap_bytes: int = _GAP_BYTES,
        trace: Trace | None = None,
    ) -> None:
        self.page_size, self.num_pages, self.device = page_size, num_pages, device
        self.bytes_to_device = self.bytes_to_host = 0
        self._windows = tuple(windows or (None,) * shape.num_layers)
        assert len(self._windows) == shape.num_layers
        self._synchronous = synchronous
        self._trace = trace
        self._coming, self._going = open_stream(device), open_stream(device)
        place = (page_size, shape.num_heads, shape.key_dim, shape.value_dim, dtype, device)

        def new_slot() -> _Slot:
            pages = KVPages.empty(num_pages, *place, values_in_keys=shape.values_in_keys)
            # torch may return memory that enqueued compute still uses.
            reusable_after = self._coming.mark_compute()
            return _Slot(pages, reusable_after, reusable_after)

        self._slots = [new_slot() for _ in range(shape.num_page_slots)]
        check_kernels(self._slots[0].pages)
        page_bytes = max(part[0].nbytes for part in self._slots[0].parts)
        self._most_gap = gap_bytes // page_bytes
        self._free = list(self._slots)
        self._filling: dict[int, _Slot] = {}
        self._held: dict[int, _Slot] = {}
        self._next = shape.num_layers
        self.layers: list[KVPages | None] = [None] * shape.num_layers
        self._buffers: list[HostBuffer] = []
        # Even without `close`: registered memory must not be unmapped.
        self._close = weakref.finalize(self, _unpin, self._buffers, (self._coming, self._going))
        self._homes = [[self._home(part) for part in self._slots[0].parts] for _ in self.layers]
        self._traffic: dict[int | None, PageTraffic] = {}
        rows = [page_rows(part, num_pages) for home in self._homes for part in home]
        self.swap_space = SwapSpace(rows, swap_place)

    @property
    def host_bytes(self) -> int:
        """Bytes of the pages in host memory."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer.pinned)

    def add_to(self, stats: RunStats) -> RunStats:
        waited_s = self._coming.compute_waited_s()
        return replace(
            super().add_to(stats),
            kv_bytes_to_device=self.bytes_to_device,
            kv_bytes_to_host=self.bytes_to_host,
            host_bytes=stats.host_bytes + self.host_bytes,
            pinned_bytes=stats.pinned_bytes + self.pinned_bytes,
            stall_s=stats.stall_s | {"link": stats.stall_s["link"] + waited_s},
        )

    def expect(self, chunks: Sequence[Chunk]) -> None:
        if len(self._free) < len(self._slots):
            self._recover_slots()
        sizes = self.num_pages, self.page_size, self._most_gap
        self._traffic = {window: find_traffic(chunks, *sizes, window) for window in set(self._windows)}
        self._next = 0
        self._look_ahead()

    def fetch_layer(self, layer: int) -> None:
        if layer not in self._filling:
            self._fetch(layer)
        slot = self._filling[layer]
        self._coming.join(slot.filled)
        self._held[layer] = slot
        del self._filling[layer]
        self.layers[layer] = slot.pages

    def release_layer(self, layer: int) -> None:
        slot = self._held[layer]
        self.layers[layer] = None
        self._going.after(self._going.mark_compute())
        begin = self._going.mark() if self._trace is not None else None
        for run in self._traffic[self._windows[layer]].going:
            for home, part in zip(self._homes[layer], slot.parts, strict=True):
                self._going.copy(home[run], part[run])
                self.bytes_to_host += part[run].nbytes
        slot.reusable_after = self._going.mark()
        self._note("device to host", layer, begin, slot.reusable_after)
        if self._synchronous:
            slot.reusable_after.synchronize()
        del self._held[layer]
        self._free.append(slot)
        self._look_ahead()

    def arrive(self) -> None:
        """Wait for copies to the host: they cover gaps too, whose pages other sequences may have by now."""
        self._going.mark().synchronize()

    def close(self) -> None:
        self.swap_space.close()
        self._close()
        self.layers[:] = [None] * len(self.layers)
        self._slots.clear()
        self._free.clear()
        self._filling.clear()
        self._held.clear()
        self._homes.clear()

    def _look_ahead(self) -> None:
        while not self._synchronous and self._free and self._next < len(self.layers):
            self._fetch(self._next)

    def _fetch(self, layer: int) -> None:
        """Enqueue the copy of a layer's pages into a free slot."""
        slot = self._free.pop(0)
        self._next = layer + 1
        self._coming.after(slot.reusable_after)
        begin = self._coming.mark() if self._trace is not None else None
        for run in self._traffic[self._windows[layer]].coming:
            for part, home in zip(slot.parts, self._homes[layer], strict=True):
                self._coming.copy(part[run], home[run])
                self.bytes_to_device += part[run].nbytes
        slot.filled = self._coming.mark()
        self._note("host to device", layer, begin, slot.filled)
        if self._synchronous:
            slot.filled.synchronize()
        self._filling[layer] = slot

    def _note(self, lane: str, layer: int, begin: Event | None, end: Event) -> None:
        if self._trace is not None and begin is not None:
            self._trace.add_between(lane, f"pages of layer {layer}", begin, end)

    def _recover_slots(self) -> None:
        """Free the slots of an interrupted pass, once all copies and compute are done."""
        for event in (self._coming.mark(), self._going.mark(), self._coming.mark_compute()):
            event.synchronize()
        self._filling.clear()
        self._held.clear()
        self.layers[:] = [None] * len(self.layers)
        self._free = list(self._slots)

    def _home(self, part: torch.Tensor) -> torch.Tensor:
        """Allocate host memory for one layer's ``part``, shaped like it."""
        if part.nbytes > MOST_REGISTERED_BYTES:
            raise PlanError(
                f"a layer's keys in all pages take {human_bytes(part.nbytes)} of host memory, and at most "
                f"{human_bytes(MOST_REGISTERED_BYTES)} can be pinned in one piece; lower zinfer.kv_cache_memory"
            )
        buffer = HostBuffer(part.nbytes)
        self._buffers.append(buffer)
        if self._coming.needs_pinned:
            buffer.touch()
            buffer.pin()
        return buffer.tensor[: part.nbytes].view(part.dtype).view(part.shape)


def _unpin(buffers: list[HostBuffer], streams: Sequence[CopyStream]) -> None:
    """Unpin the host memory of the pages, once no copy is under way."""
    try:
        for stream in streams:
            stream.mark().synchronize()
    except RuntimeError as error:  # a failed device copies nothing any more
        log.warning("the device failed while copies of keys and values were waited for: %s", error)
    for buffer in buffers:
        buffer.close()
    buffers.clear()
