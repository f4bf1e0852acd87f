"""Checksums of blocks and tensors, computed when their bytes are first transferred.

All are xxh3_128 (Collet, github.com/Cyan4973/xxHash).
"""

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash

from zinfer.nvme.reader import DiskReadError
from zinfer.offload.block import Block, Extent

Place: TypeAlias = tuple[Path, int]
"""A file, and the byte at which a tensor begins in it."""


class TensorChecksums:
    """The checksum of each tensor of some files; thread-safe.

    They do not depend on the partition into blocks or on placement, so two loads of one model can be compared.

    Args:
        sizes_bytes: of the tensors.
    """

    def __init__(self, sizes_bytes: Mapping[Place, int]) -> None:
        self._sizes_bytes = sizes_bytes
        self._found: dict[Place, bytes] = {}
        self._lock = threading.Lock()

    def wants(self, extent: Extent) -> bool:
        """Whether the extent is a whole tensor whose checksum is not known yet."""
        place = (extent.file, extent.offset)
        return self._sizes_bytes.get(place) == extent.nbytes and place not in self._found

    def add(self, place: Place, digest: bytes) -> None:
        """Keep the checksum of a tensor."""
        with self._lock:
            self._found.setdefault(place, digest)

    def missing(self, file: Path) -> list[tuple[int, int]]:
        """Return offset and size in bytes of the file's tensors without a checksum, in the file's order."""
        return sorted(
            (place[1], nbytes)
            for place, nbytes in self._sizes_bytes.items()
            if place[0] == file and place not in self._found
        )

    def of_file(self, file: Path) -> str:
        """Return one checksum for all of the file's tensors, in hexadecimal digits; none may be missing."""
        places = sorted(place for place in self._sizes_bytes if place[0] == file)
        return xxhash.xxh3_128(b"".join(self._found[place] for place in places)).hexdigest()


class BlockHash(ABC):
    """Hashes all bytes of a block once, in the file's order; a transfer after a failed one restarts at part 0."""

    is_done = False
    _next_part = 0

    def add(self, part: int, num_parts: int, pieces: Sequence[torch.Tensor]) -> None:
        """Add a part's bytes (uint8); raises DiskReadError if the block's checksum differs."""
        if part == 0:
            self._next_part = 0
            self._begin()
        if part != self._next_part:
            return
        for piece in pieces:
            self._update(piece.cpu().numpy().data)
        self._next_part += 1
        if self._next_part == num_parts:
            self._finish()
            self.is_done = True

    @abstractmethod
    def _begin(self) -> None:
        """Start over, without the parts so far."""

    @abstractmethod
    def _update(self, data: memoryview) -> None:
        """Add the next bytes."""

    def _finish(self) -> None:  # noqa: B027
        """Called after the last bytes."""


class BlockChecksum(BlockHash):
    """Compares a block's bytes with the checksum stored when they were written."""

    def __init__(self, block: Block) -> None:
        assert len({extent.file for extent in block.extents}) == 1, "a checksum is of one file"
        self._block = block

    def _begin(self) -> None:
        self._hash = xxhash.xxh3_128()

    def _update(self, data: memoryview) -> None:
        self._hash.update(data)

    def _finish(self) -> None:
        found, expected = self._hash.hexdigest(), self._block.checksum
        if found != expected:
            extent = self._block.extents[0]
            reason = (
                f"block {self._block.name}: its bytes are not those that were written (xxh3_128 {found}, expected "
                f"{expected}): the file is damaged; copy it again, or write the store again with zinfer quantize"
            )
            raise DiskReadError(errno.EIO, reason, extent.file, extent.offset)


class BlockTap(BlockHash):
    """Adds the checksums of a block's tensors to `TensorChecksums`.

    Args:
        extents: the block's.
    """

    def __init__(self, checksums: TensorChecksums, extents: Iterable[Extent]) -> None:
        self._checksums = checksums
        # The order of the chunks.
        self._extents = sorted(
            (each for each in extents if each.nbytes), key=lambda each: (str(each.file), each.offset)
        )
        self.is_done = not any(map(checksums.wants, self._extents))

    def _begin(self, index: int = 0) -> None:
        self._index = index
        self._left_bytes = self._extents[index].nbytes if index < len(self._extents) else 0
        self._hash = xxhash.xxh3_128()

    def _update(self, data: memoryview) -> None:
        while data.nbytes:
            taken, data = data[: self._left_bytes], data[self._left_bytes :]
            self._hash.update(taken)
            self._left_bytes -= taken.nbytes
            if not self._left_bytes:
                extent = self._extents[self._index]
                if self._checksums.wants(extent):
                    self._checksums.add((extent.file, extent.offset), self._hash.digest())
                self._begin(self._index + 1)
