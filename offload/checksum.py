"""Checks once that a block's bytes are those that were written, as they pass on their first way to the device."""

import errno

import torch
import xxhash

from zinfer.nvme.reader import DiskReadError
from zinfer.offload.block import Block


class BlockChecksum:
    """xxh3_128 (Collet, github.com/Cyan4973/xxHash) over a block's bytes in the file's order.

    The first move that brings the whole block decides; later ones are not hashed again.
    """

    def __init__(self, block: Block) -> None:
        assert block.checksum is not None
        assert len({extent.file for extent in block.extents}) == 1, "a checksum is of one file"
        self._block = block
        self._expected = block.checksum
        self._hash = xxhash.xxh3_128()
        self._next_part = 0
        self.is_checked = False

    def add(self, part: int, num_parts: int, pieces: list[torch.Tensor]) -> None:
        """Take a part's bytes (uint8) into account; a move that was cut short begins anew with part 0.

        Raises:
            DiskReadError: it was the last part, and the bytes are others.
        """
        if part == 0:
            self._hash.reset()
            self._next_part = 0
        if part != self._next_part:
            return
        for piece in pieces:
            self._hash.update(piece.cpu().numpy().data)
        self._next_part += 1
        if self._next_part == num_parts:
            self._compare()

    def _compare(self) -> None:
        found = self._hash.hexdigest()
        if found != self._expected:
            extent = self._block.extents[0]
            reason = (
                f"block {self._block.name}: its bytes are not those that were written (xxh3_128 {found}, expected "
                f"{self._expected}): the file is damaged; copy it again, or write the store again with zinfer quantize"
            )
            raise DiskReadError(errno.EIO, reason, extent.file, extent.offset)
        self.is_checked = True
