"""Compares a block's bytes with the checksum that was stored when they were written, as they are first transferred.

Checksums are xxh3_128 (Collet, github.com/Cyan4973/xxHash).
"""

import errno
from collections.abc import Sequence

import torch
import xxhash

from zinfer.nvme.reader import DiskReadError
from zinfer.offload.block import Block


class BlockChecksum:
    """Hashes all bytes of a block once, in the file's order; a transfer after a failed one restarts at part 0.

    Args:
        block: of one file, with a checksum.

    Attributes:
        is_done: whether the bytes were compared, and are those that were written.
    """

    def __init__(self, block: Block) -> None:
        assert len({extent.file for extent in block.extents}) == 1, "a checksum is of one file"
        self._block = block
        self._next_part = 0
        self._hash = xxhash.xxh3_128()
        self.is_done = False

    def add(self, part: int, num_parts: int, pieces: Sequence[torch.Tensor]) -> None:
        """Add a part's bytes (uint8).

        Raises:
            DiskReadError: it was the last part, and the block's checksum is another.
        """
        if part == 0:
            self._next_part, self._hash = 0, xxhash.xxh3_128()
        if part != self._next_part:
            return
        for piece in pieces:
            self._hash.update(piece.cpu().numpy().data)
        self._next_part += 1
        if self._next_part == num_parts:
            self._compare()
            self.is_done = True

    def _compare(self) -> None:
        found, expected = self._hash.hexdigest(), self._block.checksum
        if found != expected:
            extent = self._block.extents[0]
            reason = (
                f"block {self._block.name}: its bytes are not those that were written (xxh3_128 {found}, expected "
                f"{expected}): the file is damaged; copy it again, or write the store again with zinfer quantize"
            )
            raise DiskReadError(errno.EIO, reason, extent.file, extent.offset)
