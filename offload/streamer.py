"""Keeps the blocks of a model moving towards the device: `prefetch`, `wait`, `release`.

[Note: lifetime of a slot]
A slot is free, filling, ready, or held. `prefetch` takes a free slot and starts a move into it (filling, then ready);
`wait` makes the compute stream wait for the move's event and hands out the views (held); `release` records the event
after which the slot may be overwritten and frees it. The next move into the slot waits for that event on the copy
stream, so the host never waits for the device here.

One thread drives a streamer; the mover threads only run moves. The synchronous twin begins each move in `wait`.

A KeyboardInterrupt may strike between any two lines of that thread. A slot may then be in none of the four states, but
only one that no mover touches and whose `vacant` is right: a move is registered before it is submitted, and stays
registered until it has arrived. `settle` finds such slots and frees them.
"""

import time
from collections.abc import Mapping, Sequence

import torch

from zinfer.offload.block import Block, Tier
from zinfer.offload.movers import Move, Movers, Transfer
from zinfer.offload.order import AccessOrder
from zinfer.offload.slots import DeviceSlots, StagingRing
from zinfer.offload.source import Source
from zinfer.offload.stream import CopyStream, Event


class Streamer:
    """Streams blocks through device slots, guessing ahead.

    Args:
        blocks: the streamed blocks in the model's order.
        sources: where each block's slab comes from, by block index.
        stream: the copy stream of the device.
        slots: device slots, each large enough for any of the blocks.
        staging: staging slots, each large enough for any source that needs one; empty if none does.
        synchronous: move nothing ahead of its use (the twin that the pipeline is checked against).
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        sources: Mapping[int, Source],
        stream: CopyStream,
        slots: DeviceSlots,
        staging: StagingRing,
        *,
        synchronous: bool = False,
    ) -> None:
        self._blocks = {block.index: block for block in blocks}
        self._sources = sources
        self._stream = stream
        self._slots = slots
        self._synchronous = synchronous
        self._order = AccessOrder([block.index for block in blocks])
        self._moves: dict[int, Move] = {}
        self._held: dict[int, Move] = {}
        # Not a method of this object: a cycle would keep the slots' memory until Python's collector comes by.
        self._transfer = Transfer(sources, stream, staging, synchronous=synchronous)
        self._movers = Movers(max(len(staging.slots), len(slots)), self._transfer)
        self._stall_s = {"disk": 0.0, "host": 0.0, "link": 0.0}

    def prefetch(self, block: Block) -> None:
        """Start moving a block into a free slot and return; nothing to do if it is on its way or there."""
        if block.index in self._moves or block.index in self._held:
            return
        move = Move(block, self._slots.take())
        try:
            self._moves[block.index] = move
            self._movers.submit(move)
        except BaseException:  # Ctrl-C between the two: a registered move must run, and runs once
            self._movers.submit(move)
            raise

    def wait(self, block: Block) -> dict[str, torch.nn.Parameter]:
        """Make the compute stream wait for the block; returns its tensors by name, valid until `release`.

        Raises whatever the move failed with, such as DiskReadError; the streamer stays usable.
        """
        assert block.index not in self._held, f"block {block.name} is in use already"
        begin_s = time.perf_counter()
        self._drop_failed_guess(block)
        if block.index not in self._moves:
            self._make_room()
            self.prefetch(block)
        self._order.use(block.index)
        self._look_ahead()
        move = self._moves[block.index]
        self._stream.join(self._arrival(move, begin_s))
        self._held[block.index] = move
        del self._moves[block.index]
        return move.slot.views(block.layout)

    def release(self, block: Block) -> None:
        """Let the block's slot be overwritten once the compute so far is done, and move the next block into it."""
        slot = self._held[block.index].slot
        slot.vacant = self._stream.mark_compute()
        self._moves.pop(block.index, None)  # there only if an interrupt struck in `wait`
        del self._held[block.index]
        self._slots.put(slot)
        self._look_ahead()

    def settle(self) -> None:
        """Release what a pass that was cut short (an exception, Ctrl-C at any line) has left held, and lost slots."""
        for block in self.held():
            self.release(block)
        self._slots.reclaim(move.slot for move in self._moves.values())

    def held(self) -> list[Block]:
        """The blocks in use, between `wait` and `release`."""
        return [move.block for move in self._held.values()]

    @property
    def bytes_moved(self) -> int:
        """Bytes copied into device slots so far, guesses that nobody used included."""
        return self._transfer.bytes_moved

    def stall_s(self) -> dict[str, float]:
        """Seconds that compute waited so far, by cause: disk, host, link."""
        stall_s = dict(self._stall_s)
        stall_s["link"] += self._stream.stall_s()
        return stall_s

    def close(self) -> None:
        """Wait for the moves under way and stop the threads; the slots may be freed after."""
        self._movers.close()
        self._stream.mark().synchronize()
        self._moves.clear()

    def _look_ahead(self) -> None:
        if self._synchronous:
            return
        for index in self._order.ahead(len(self._slots)):
            if not self._slots.num_free:
                return
            self.prefetch(self._blocks[index])

    def _drop_failed_guess(self, block: Block) -> None:
        """Forget a move that was made ahead and failed: what was wrong then (a file being replaced) may be mended."""
        move = self._moves.get(block.index)
        if move is not None and move.is_over and move.failure() is not None:
            self._give_up(move)

    def _make_room(self) -> None:
        """Free a slot for a block that nobody expected: the farthest guess gives way."""
        if self._slots.num_free:
            return
        if not self._moves:
            raise RuntimeError(f"all {len(self._slots)} device slots are in use at once; raise zinfer.num_slots")
        self._give_up(next(reversed(self._moves.values())))

    def _give_up(self, move: Move) -> None:
        """Free the slot of a move whose bytes nobody will use; if it failed, nobody waits for the failure either."""
        if move.failure() is None:
            move.slot.vacant = move.sent()
        del self._moves[move.block.index]
        self._slots.put(move.slot)

    def _arrival(self, move: Move, begin_s: float) -> Event:
        """The move's event, and the account of how long the host has waited for it since ``begin_s``."""
        failure = move.failure()
        if failure is not None:
            self._give_up(move)
            raise failure
        end_s = time.perf_counter()
        source = self._sources[move.block.index]
        loading_s = min(max(move.loaded_at_s - begin_s, 0.0), end_s - begin_s)
        self._stall_s["disk" if source.tier is Tier.DISK else "host"] += loading_s
        self._stall_s["link"] += end_s - begin_s - loading_s
        return move.sent()
