"""Streams the blocks of a model to the device: `prefetch`, `wait`, `release`.

[Note: lifetime of a slot]
A slot is free, filling, ready, or held. `prefetch` takes a free slot and starts a transfer into it (filling, then
ready); `wait` makes the compute stream wait for the transfer's event and returns the views (held); `release` records
the event after which the slot may be overwritten, and frees it. The copy stream waits for that event before the next
transfer into the slot, so the host never waits for the device here.

One thread drives a streamer; the lanes' threads only run transfers. In synchronous mode transfers start in `wait`.

A block loaded into a borrowed slot is cached there: `release` leaves it ready and frees nothing, until
`remove_cache_slots`.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch

from zinfer.offload.access_predictor import AccessPredictor
from zinfer.offload.block import Block, SlabLayout, Tier
from zinfer.offload.ranks import GatherLane
from zinfer.offload.slots import DeviceSlots, Slot
from zinfer.offload.source import Source
from zinfer.offload.stats import Arrivals, Stalls
from zinfer.offload.stream import Event
from zinfer.offload.trace import Trace
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import LaneClosed, TransferLane


class _Use(NamedTuple):
    """A block in a slot or on its way into one; ``begin`` is the event at which its compute begins."""

    block: Block
    slot: Slot
    transfer: Transfer
    begin: Event | None = None


class Streamer:
    """Streams blocks through device slots, prefetching the predicted ones.

    Args:
        blocks: the streamed blocks in the model's order.
        sources: where each block's slab comes from, by block index.
        lanes: run the transfers of each tier, on separate copy streams so that no lane waits behind another.
        slots: device slots, each large enough for any of the blocks.
        synchronous: prefetch nothing; the reference for checks of the pipeline.
        trace: records compute.
        gathers: gathers slabs that are shared with other ranks; all ranks use the same blocks in the same order.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        sources: Mapping[int, Source],
        lanes: Mapping[Tier, TransferLane],
        slots: DeviceSlots,
        *,
        synchronous: bool = False,
        trace: Trace | None = None,
        gathers: GatherLane | None = None,
    ) -> None:
        self._gathers = gathers
        self._blocks = {block.index: block for block in blocks}
        # One object for equal layouts, so that looking up a slot's views compares no tensors.
        same: dict[SlabLayout, SlabLayout] = {}
        self._layouts = {block.index: same.setdefault(block.layout, block.layout) for block in blocks}
        self._sources = sources
        self._lanes = lanes
        self._slots = slots
        self._synchronous = synchronous
        self._trace = trace
        self._order = AccessPredictor([block.index for block in blocks])
        self._is_mixed = len({source.tier for source in sources.values()}) > 1
        self._moving: dict[int, _Use] = {}
        self._held: dict[int, _Use] = {}
        self._borrowed: list[Slot] = []  # the free borrowed slots
        self._num_borrowed = 0
        self._cached: dict[int, _Use] = {}
        self._arrivals = Arrivals()
        self._stalls = Stalls(dict.fromkeys(lanes.values()))

    def prefetch(self, block: Block) -> None:
        """Start a block's transfer into a free slot, unless it is in a slot or on its way."""
        if self._is_here(block.index):
            return
        source = self._sources[block.index]
        stays = self._may_stay(block.index) or not self._slots.num_free
        slot = self._borrowed.pop() if stays else self._slots.take()
        lane = self._lanes[source.tier]
        if self._gathers is None:
            transfer = Transfer(block.name, source, Target(slot.buffer, lane.stream, slot.reusable_after))
        else:
            transfer = self._gathers.begin(block, source, slot, lane.stream)
        self._moving[block.index] = _Use(block, slot, transfer)
        lane.submit(transfer)

    def wait(self, block: Block) -> dict[str, torch.nn.Parameter]:
        """Make the compute stream wait for the block; returns its tensors by name, valid until `release`.

        Raises the transfer's error, such as DiskReadError; the streamer stays usable.
        """
        assert block.index not in self._held, f"block {block.name} is in use already"
        if self._gathers is not None:
            self._take_turn(self._gathers, block)
        return self._wait(block)

    def serve(self, index: int) -> None:
        """Take part in another rank's use of a block: gather it, and let it go."""
        block = self._blocks[index]
        self._wait(block)
        self.release(block)

    def _take_turn(self, gathers: GatherLane, block: Block) -> None:
        """Take part in the other ranks' uses that come before this one."""
        if self._held:
            held = ", ".join(use.block.name for use in self._held.values())
            raise RuntimeError(f"{block.name} is asked for while {held} is in use, which several ranks cannot follow")
        while True:
            expected = next(self._order.ahead(), block.index) == block.index
            turn = gathers.take_turn(block.index, expected=expected)
            if turn.is_own:
                return
            self.serve(turn.block)

    def _wait(self, block: Block) -> dict[str, torch.nn.Parameter]:
        prefetched = self._is_here(block.index)
        if not prefetched:
            self._make_room()
            self.prefetch(block)
        self._order.use(block.index)
        self._look_ahead()
        begin_s, computed = time.perf_counter(), self._mark_compute_before(block)
        use = self._wait_until_sent(block, prefetched)
        self._stalls.note_wait(use.transfer, begin_s, computed)
        begin = use.transfer.target.stream.join(use.transfer.sent())
        if block.index not in self._cached:
            self._arrivals.note(begin, use.transfer.source)
        self._held[block.index] = _Use(block, use.slot, use.transfer, begin)
        self._moving.pop(block.index, None)
        return use.slot.views(self._layouts[block.index])

    def release(self, block: Block) -> None:
        """Free the slot for reuse after the compute so far, and prefetch the next block."""
        use = self._held[block.index]
        use.slot.reusable_after = use.transfer.target.stream.mark_compute()
        if self._trace is not None and use.begin is not None:
            self._trace.add_between("compute", block.name, use.begin, use.slot.reusable_after)
        if use.slot.borrowed:
            self._cached[block.index] = use
        del self._held[block.index]
        if not use.slot.borrowed:
            self._slots.put(use.slot)
        self._look_ahead()

    def release_all(self, but: Collection[int] = ()) -> None:
        """Release the blocks that a failed pass still holds, ``but`` those of these indices."""
        for block in self.held():
            if block.index not in but:
                self.release(block)

    def held(self) -> list[Block]:
        """The blocks in use, between `wait` and `release`."""
        return [use.block for use in self._held.values()]

    def holds(self, block: Block) -> bool:
        """Whether the block is in use."""
        return block.index in self._held

    def slot_of(self, block: Block) -> Slot:
        """The slot of a block in use."""
        return self._held[block.index].slot

    def possible_slots(self, block: Block) -> list[Slot]:
        """Return the slots that a block may be in after `wait`; valid while `cached` returns the same."""
        cached = self._cached.get(block.index)
        return list(self._slots.slots) if cached is None else [cached.slot]

    def cached(self) -> tuple[tuple[int, int], ...] | None:
        """Return index and address of the blocks in borrowed slots; None while some borrowed slots are not filled."""
        if self._borrowed or any(use.slot.borrowed for use in self._moving.values()):
            return None
        return tuple(sorted((index, use.slot.address) for index, use in self._cached.items()))

    @property
    def num_passing(self) -> int:
        """Number of blocks transferred in every pass, once the borrowed slots are filled."""
        return max(len(self._blocks) - self._num_borrowed, 0)

    @property
    def passing_bytes(self) -> int:
        """Size of the blocks that are not cached."""
        return sum(block.nbytes for index, block in self._blocks.items() if index not in self._cached)

    def add_cache_slots(self, slots: Iterable[Slot]) -> None:
        """Add borrowed slots, in which blocks are cached; called between passes."""
        several = list(slots)
        self._num_borrowed += len(several)
        self._borrowed += several

    def remove_cache_slots(self) -> None:
        """Stop using the borrowed slots, so that later compute may write to them; called between passes."""
        for use in [use for use in self._moving.values() if use.slot.borrowed]:
            self._give_up(use)
        stream = next(iter(self._lanes.values())).stream
        for slot in self._borrowed:  # a dropped transfer may still write
            stream.join(slot.reusable_after)
        self._cached.clear()
        self._borrowed.clear()
        self._num_borrowed = 0

    def bytes_arrived(self) -> tuple[int, int]:
        """Return the bytes copied into device slots so far, and the bytes read from the disk for them.

        Blocks not used yet do not count; wrong predictions do.
        """
        return self._arrivals.sums()

    def resume(self) -> None:
        """Note that a call begins: idle lanes wait for compute."""
        self._stalls.resume()

    def pause(self) -> None:
        """Note that a call is over: idle lanes wait for the caller."""
        self._stalls.pause(use.transfer for use in self._moving.values())

    def stall_s(self) -> dict[str, float]:
        """Return the seconds of stalls so far, by cause."""
        return self._stalls.seconds()

    def close(self) -> None:
        """Stop the lanes, wait for transfers under way, and free the slots."""
        if self._gathers is not None:
            self._gathers.close()
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            lane.stream.mark().synchronize()
        for uses in (self._moving, self._held, self._cached):
            uses.clear()
        self._borrowed.clear()
        self._slots.close()

    def _look_ahead(self) -> None:
        if self._synchronous:
            return
        if self._slots.num_free or self._borrowed:
            for index in self._expected():
                if self._is_here(index):
                    continue
                if not self._slots.num_free and not self._may_stay(index):
                    break
                self._stalls.note_free_slot(use.transfer for use in self._moving.values())
                self.prefetch(self._blocks[index])
            else:
                self._stalls.note_ahead()
                return
        self._stalls.note_full()

    def _expected(self) -> list[int]:
        """Return the next uses, in the order in which they get slots.

        Disk and link are busy at the same time only if a disk block is always on its way, however far ahead of its
        use. With three slots or more it gets a slot right after the block used next.
        """
        num_slots = len(self._slots)
        ahead = (index for index in self._order.ahead() if index not in self._cached)
        expected = list(islice(ahead, num_slots))
        num_near = num_slots - 2
        if not self._is_mixed or num_near < 1 or any(map(self._is_on_disk, expected[: num_near + 1])):
            return expected
        from_disk = next(filter(self._is_on_disk, chain(expected, ahead)), None)
        if from_disk is None:
            return expected
        others = [index for index in expected if index != from_disk]
        return [*others[:num_near], from_disk, *others[num_near:]][:num_slots]

    def _is_here(self, index: int) -> bool:
        """Whether a block is in a slot, or on its way into one."""
        return index in self._moving or index in self._held or index in self._cached

    def _may_stay(self, index: int) -> bool:
        """Whether a block transferred now gets a borrowed slot; blocks from disk have priority over host blocks."""
        if not self._borrowed or not self._is_mixed or self._is_on_disk(index):
            return bool(self._borrowed)
        return all(other in self._cached for other in self._blocks if self._is_on_disk(other))

    def _is_on_disk(self, index: int) -> bool:
        return self._sources[index].tier is Tier.DISK

    def _make_room(self) -> None:
        """Free a slot for a block that was not predicted: drop the farthest prefetch."""
        if self._slots.num_free or self._borrowed:
            return
        if not self._moving:
            raise RuntimeError(f"all {len(self._slots)} device slots are in use at once; raise zinfer.num_slots")
        self._give_up(next(reversed(self._moving.values())))

    def _give_up(self, use: _Use) -> None:
        """Drop a transfer and free its slot, once no copy writes to it."""
        use.transfer.wait()
        last_write = use.transfer.last_write()
        if last_write is not None and not use.transfer.has_failed:
            self._arrivals.note(last_write, use.transfer.source)
        use.slot.reusable_after = last_write or use.slot.reusable_after
        del self._moving[use.block.index]
        if use.slot.borrowed:
            self._borrowed.append(use.slot)
        else:
            self._slots.put(use.slot)

    def _mark_compute_before(self, block: Block) -> Event | None:
        """Return the event after the compute so far, if the block has to be waited for."""
        transfer = self._use_of(block).transfer
        return transfer.target.stream.mark_compute() if self._synchronous or not transfer.is_over else None

    def _use_of(self, block: Block) -> _Use:
        """Return where a block is cached, or is being transferred to."""
        return self._cached.get(block.index) or self._moving[block.index]

    def _wait_until_sent(self, block: Block, prefetched: bool) -> _Use:
        """Wait until the block's copies are enqueued; in synchronous mode, until they are done.

        A failed prefetch is retried: the cause (a file being replaced) may be gone.
        """
        use = self._use_of(block)
        failure = use.transfer.failure()
        if failure is not None:
            self._give_up(use)
            if not prefetched or isinstance(failure, LaneClosed) or self._gathers is not None:
                raise failure
            self.prefetch(block)
            return self._wait_until_sent(block, prefetched=False)
        if self._synchronous:
            use.transfer.sent().synchronize()
        return use
