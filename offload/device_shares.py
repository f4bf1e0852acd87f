"""Where ranks keep the blocks that they divide among their devices, in memory that all of them map.

Of blocks of one size each rank keeps every n-th as a whole: it computes with that in place, and the others copy it.
What is left over, fewer blocks than ranks, is divided by ranges. A rank keeps as many bytes either way; but a range of
its own would be copied within the device for each use, beside those of the others.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zinfer.offload.block import Block
from zinfer.offload.ranks import Ranks
from zinfer.offload.source import PeerSource
from zinfer.offload.stream import CopyStream


class _Place(NamedTuple):
    """``owner``: the rank that has all of it; None: each has its range. ``begin``: in that memory, on every rank."""

    owner: int | None
    begin: int


class DeviceShares:
    """The divided blocks of one model; made by all ranks with the same blocks.

    Args:
        blocks: in the model's order.
        ranks: that can share memory.
    """

    def __init__(self, blocks: Sequence[Block], ranks: Ranks) -> None:
        self._partition = ranks.partition
        self._places, num_bytes = self._placed(blocks)
        self._shared = ranks.share(num_bytes)

    def _placed(self, blocks: Sequence[Block]) -> tuple[dict[int, _Place], int]:
        """Return the place of each block by index, and the bytes of a rank's memory."""
        alike = defaultdict[int, list[Block]](list)
        for block in blocks:
            alike[block.nbytes].append(block)
        places, end, size = dict[int, _Place](), 0, self._partition.size
        for nbytes, several in alike.items():
            each = self._partition.range_bytes(nbytes)
            num_whole = len(several) // size * size
            for number, block in enumerate(several):
                owner = number % size if number < num_whole else None
                places[block.index] = _Place(owner, end)
                if owner is None:
                    end += each
                elif owner == size - 1:  # one of each rank lies there
                    end += each * size
        return places, end

    def own(self, block: Block) -> torch.Tensor | None:
        """Return what this rank keeps of a block: memory for all of it, or for its range; None if others have it."""
        owner, begin = self._places[block.index]
        if owner is None:
            first, end = self._partition.bounds(block.nbytes)
            return self._shared.own[begin : begin + end - first]
        return self._shared.own[begin : begin + block.nbytes] if owner == self._partition.rank else None

    def source(self, block: Block, beside: CopyStream) -> PeerSource | None:
        """Return what copies a block into a slot; None if it is this rank's, and used in place.

        Args:
            beside: for the copy of an own range.
        """
        owner, begin = self._places[block.index]
        if owner == self._partition.rank:
            return None
        if owner is not None:
            return PeerSource([self._shared.of(owner)[begin : begin + block.nbytes]], None, beside)
        each = self._partition.range_bytes(block.nbytes)
        ranges = [self._shared.of(rank)[begin : begin + each] for rank in range(self._partition.size)]
        return PeerSource(ranges, self._partition.rank, beside)
