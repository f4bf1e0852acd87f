"""Keeps the blocks of a model moving towards the device: `prefetch`, `wait`, `release`.

[Note: lifetime of a slot]
A slot is free, filling, ready, or held. `prefetch` takes a free slot and starts a move into it (filling, then ready);
`wait` makes the compute stream wait for the move's event and hands out the views (held); `release` records the event
after which the slot may be overwritten and frees it. The next move into the slot waits for that event on the copy
stream, so the host never waits for the device here.

One thread drives a streamer; the lanes' threads only run moves. The synchronous twin begins each move in `wait`.

Slots may be borrowed. A block that moves into one is there from then on: `release` leaves it ready, and no slot gets
free. `give_back` ends that; the compute that comes after waits for the copies that were under way.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch

from zinfer.offload.access_predictor import AccessPredictor
from zinfer.offload.arrivals import Arrivals
from zinfer.offload.block import Block, SlabLayout, Tier
from zinfer.offload.slots import DeviceSlots, Slot
from zinfer.offload.source import Source
from zinfer.offload.stalls import Stalls
from zinfer.offload.stream import Event
from zinfer.offload.trace import Trace
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import LaneClosed, TransferLane


class _Use(NamedTuple):
    """A block that is moving into a slot, or in it; ``begin`` is where the compute that uses it begins."""

    block: Block
    slot: Slot
    move: Transfer
    begin: Event | None = None


class Streamer:
    """Streams blocks through device slots, guessing ahead.

    Args:
        blocks: the streamed blocks in the model's order.
        sources: where each block's slab comes from, by block index.
        lanes: what carries the blocks of each tier. Their copy streams differ, so that none waits behind the other's.
        slots: device slots, each large enough for any of the blocks.
        synchronous: move nothing ahead of its use (the twin that the pipeline is checked against).
        trace: where computes are noted.
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
    ) -> None:
        self._blocks = {block.index: block for block in blocks}
        # One object for equal layouts: looking up a slot's views then compares no tensors.
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
        self._borrowed: list[Slot] = []  # those that are free
        self._num_borrowed = 0
        self._cached: dict[int, _Use] = {}
        self._arrivals = Arrivals()
        self._stalls = Stalls(lanes.values())

    def prefetch(self, block: Block) -> None:
        """Start moving a block into a free slot and return; nothing to do if it is on its way or there."""
        if self._is_here(block.index):
            return
        source = self._sources[block.index]
        stays = self._may_stay(block.index) or not self._slots.num_free
        slot = self._borrowed.pop() if stays else self._slots.take()
        lane = self._lanes[source.tier]
        move = Transfer(block.name, source, Target(slot.buffer, lane.stream, slot.reusable_after))
        self._moving[block.index] = _Use(block, slot, move)
        lane.submit(move)

    def wait(self, block: Block) -> dict[str, torch.nn.Parameter]:
        """Make the compute stream wait for the block; returns its tensors by name, valid until `release`.

        Raises whatever the move failed with, such as DiskReadError; the streamer stays usable.
        """
        assert block.index not in self._held, f"block {block.name} is in use already"
        begin_s = time.perf_counter()
        guessed = self._is_here(block.index)
        if not guessed:
            self._make_room()
            self.prefetch(block)
        self._order.use(block.index)
        self._look_ahead()
        use = self._come(block, guessed)
        self._stalls.note_wait(use.move, begin_s)
        begin = use.move.target.stream.join(use.move.sent())
        if block.index not in self._cached:
            self._arrivals.note(begin, use.move.source)
        self._held[block.index] = _Use(block, use.slot, use.move, begin)
        self._moving.pop(block.index, None)
        return use.slot.views(self._layouts[block.index])

    def release(self, block: Block) -> None:
        """Let the block's slot be overwritten once the compute so far is done, and move the next block into it."""
        use = self._held[block.index]
        use.slot.reusable_after = use.move.target.stream.mark_compute()
        if self._trace is not None and use.begin is not None:
            self._trace.add_between("compute", block.name, use.begin, use.slot.reusable_after)
        if use.slot.borrowed:
            self._cached[block.index] = use
        del self._held[block.index]
        if not use.slot.borrowed:
            self._slots.put(use.slot)
        self._look_ahead()

    def settle(self) -> None:
        """Release what a pass that failed has left held."""
        for block in self.held():
            self.release(block)

    def held(self) -> list[Block]:
        """The blocks in use, between `wait` and `release`."""
        return [use.block for use in self._held.values()]

    def holds(self, block: Block) -> bool:
        """Whether the block is in use."""
        return block.index in self._held

    def place(self, block: Block) -> Slot:
        """The slot of a block in use."""
        return self._held[block.index].slot

    def places(self, block: Block) -> list[Slot]:
        """The slots that a block may be in when it is waited for, as long as `cached` says the same."""
        cached = self._cached.get(block.index)
        return list(self._slots.slots) if cached is None else [cached.slot]

    def cached(self) -> tuple[tuple[int, int], ...] | None:
        """The blocks that stay in borrowed slots, by index, and where; None while others are to come there."""
        if self._borrowed or any(use.slot.borrowed for use in self._moving.values()):
            return None
        return tuple(sorted((index, use.slot.address) for index, use in self._cached.items()))

    @property
    def num_passing(self) -> int:
        """Blocks that come in every pass, once the others have come to stay."""
        return max(len(self._blocks) - self._num_borrowed, 0)

    @property
    def passing_bytes(self) -> int:
        """Of blocks that stay nowhere."""
        return sum(block.nbytes for index, block in self._blocks.items() if index not in self._cached)

    def add_cache_slots(self, slots: Iterable[Slot]) -> None:
        """Take more slots, for blocks to stay in; between passes."""
        several = list(slots)
        self._num_borrowed += len(several)
        self._borrowed += several

    def give_back(self) -> None:
        """Use none of the borrowed slots any more: compute that follows may write to them; between passes."""
        for use in [use for use in self._moving.values() if use.slot.borrowed]:
            self._give_up(use)
        stream = next(iter(self._lanes.values())).stream
        for slot in self._borrowed:  # a move that was given up may still write
            stream.join(slot.reusable_after)
        self._cached.clear()
        self._borrowed.clear()
        self._num_borrowed = 0

    def bytes_arrived(self) -> tuple[int, int]:
        """Bytes copied into device slots so far, and bytes read from the disk for them.

        Blocks on their way, or ahead of their use, are not among them; guesses that were given up are.
        """
        return self._arrivals.sums()

    def resume(self) -> None:
        """A call begins: what the lanes wait for from here on is compute."""
        self._stalls.resume()

    def pause(self) -> None:
        """A call is over: until the next one the lanes wait for the caller."""
        self._stalls.pause(use.move for use in self._moving.values())

    def stall_s(self) -> dict[str, float]:
        """Seconds waited so far, by cause: compute for disk, host and link, copies for compute."""
        return self._stalls.seconds()

    def close(self) -> None:
        """Stop the lanes, wait for what is under way, and let go of the slots."""
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
                self._stalls.note_room(use.move for use in self._moving.values())
                self.prefetch(self._blocks[index])
            else:
                self._stalls.note_ahead()
                return
        self._stalls.note_full()

    def _expected(self) -> list[int]:
        """The next uses, in the order in which they get slots.

        Disk and link work side by side only if a disk block is always on its way, however far ahead of its use: with
        three slots or more it takes the place behind the nearest of the others.
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
        """Whether a block that comes now gets a borrowed slot: blocks from disk before those from host memory."""
        if not self._borrowed or not self._is_mixed or self._is_on_disk(index):
            return bool(self._borrowed)
        return all(other in self._cached for other in self._blocks if self._is_on_disk(other))

    def _is_on_disk(self, index: int) -> bool:
        return self._sources[index].tier is Tier.DISK

    def _make_room(self) -> None:
        """Free a slot for a block that nobody expected: the farthest guess gives way."""
        if self._slots.num_free or self._borrowed:
            return
        if not self._moving:
            raise RuntimeError(f"all {len(self._slots)} device slots are in use at once; raise zinfer.num_slots")
        self._give_up(next(reversed(self._moving.values())))

    def _give_up(self, use: _Use) -> None:
        """Free the slot of a move whose bytes nobody will use, once no copy writes to it."""
        use.move.wait()
        last_write = use.move.last_write()
        if last_write is not None and not use.move.has_failed:
            self._arrivals.note(last_write, use.move.source)
        use.slot.reusable_after = last_write or use.slot.reusable_after
        del self._moving[use.block.index]
        if use.slot.borrowed:
            self._borrowed.append(use.slot)
        else:
            self._slots.put(use.slot)

    def _come(self, block: Block, guessed: bool) -> _Use:
        """Wait until the block is sent; for the synchronous twin, until it is there.

        A guess that failed is made again: what was wrong when it was made (a file being replaced) may be mended. A lane
        that was closed would not carry it.
        """
        use = self._cached.get(block.index) or self._moving[block.index]
        failure = use.move.failure()
        if failure is not None:
            self._give_up(use)
            if not guessed or isinstance(failure, LaneClosed):
                raise failure
            self.prefetch(block)
            return self._come(block, guessed=False)
        if self._synchronous:
            use.move.sent().synchronize()
        return use
