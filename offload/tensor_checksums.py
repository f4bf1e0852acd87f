"""Takes checksums of tensors when their bytes are first read from their files, so that nothing is read for it alone."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash

from zinfer.offload.block import Extent

Place: TypeAlias = tuple[Path, int]
"""A file, and the byte at which a tensor begins in it."""


class TensorChecksums:
    """xxh3_128 (Collet, github.com/Cyan4973/xxHash) of each tensor of some files; any thread may ask and add.

    They do not depend on how blocks are cut and where these have their homes, so that two loads can be compared.

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
        """Offset and size in bytes of the file's tensors without a checksum, in the file's order."""
        return sorted(
            (place[1], nbytes)
            for place, nbytes in self._sizes_bytes.items()
            if place[0] == file and place not in self._found
        )

    def of_file(self, file: Path) -> str:
        """One checksum for all of the file's tensors, in hexadecimal digits; none of them may be missing."""
        places = sorted(place for place in self._sizes_bytes if place[0] == file)
        return xxhash.xxh3_128(b"".join(self._found[place] for place in places)).hexdigest()


class BlockTap:
    """Feeds `TensorChecksums` from the moves of one block, until one has brought the whole block.

    Args:
        extents: the block's.
    """

    def __init__(self, checksums: TensorChecksums, extents: Iterable[Extent]) -> None:
        self._checksums = checksums
        # The order in which chunks bring them.
        self._extents = sorted(
            (each for each in extents if each.nbytes), key=lambda each: (str(each.file), each.offset)
        )
        self._next_part = 0
        self._begin(0)
        self.is_done = not any(map(checksums.wants, self._extents))

    def add(self, part: int, num_parts: int, pieces: Sequence[torch.Tensor]) -> None:
        """Take a part's bytes (uint8) into account; a move that was cut short begins anew with part 0."""
        if part == 0:
            self._next_part = 0
            self._begin(0)
        if part != self._next_part:
            return
        for piece in pieces:
            self._take(piece.cpu().numpy().data)
        self._next_part += 1
        self.is_done = self._next_part == num_parts

    def _begin(self, index: int) -> None:
        self._index = index
        self._left_bytes = self._extents[index].nbytes if index < len(self._extents) else 0
        self._hash = xxhash.xxh3_128()

    def _take(self, data: memoryview) -> None:
        while data.nbytes:
            taken, data = data[: self._left_bytes], data[self._left_bytes :]
            self._hash.update(taken)
            self._left_bytes -= taken.nbytes
            if not self._left_bytes:
                extent = self._extents[self._index]
                if self._checksums.wants(extent):
                    self._checksums.add((extent.file, extent.offset), self._hash.digest())
                self._begin(self._index + 1)
