"""Swaps the pages of preempted sequences to host memory, and beyond its limit to a file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from zinfer.kv_cache import MOVED_AT_ONCE_BYTES
from zinfer.nvme.aligned import align_up
from zinfer.nvme.memory import map_memory
from zinfer.nvme.scratch import ScratchFile
from zinfer.sampling.async_copy import send


@dataclass(frozen=True)
class SwapPlace:
    """Where to keep pages of preempted sequences.

    Attributes:
        most_in_memory: most pages in host memory; None: no limit.
        folder: folder of the file for the other pages; None: no file, all pages are in host memory.
        staged_bytes: most bytes of the memory between the pages and the file, one page at least.
    """

    most_in_memory: int | None = None
    folder: Path | None = None
    staged_bytes: int = MOVED_AT_ONCE_BYTES


UNLIMITED: Final = SwapPlace()


@dataclass(frozen=True)
class _InFile:
    """Places in the file, one per page."""

    places: list[int]


class SwapSpace:
    """Keeps the contents of pages, by sequence number.

    Args:
        rows: the pages' memory: tensors with one row per page, of a dtype that can be indexed.
        swap_place: where to keep their contents.

    Raises:
        ScratchError: no file can be made in the folder.
    """

    def __init__(self, rows: Sequence[torch.Tensor], swap_place: SwapPlace) -> None:
        self._rows = rows
        self._most_in_memory = swap_place.most_in_memory
        self._kept: dict[int, list[torch.Tensor] | _InFile] = {}
        self._num_in_memory = 0
        self._file: ScratchFile | None = None
        page_bytes = align_up(sum(map(_row_bytes, rows)))
        self._most_at_once = max(1, swap_place.staged_bytes // page_bytes)
        if swap_place.folder is not None:
            self._file = ScratchFile(swap_place.folder, page_bytes)
            nbytes = self._most_at_once * self._file.place_bytes
            whole = torch.frombuffer(map_memory(nbytes), dtype=torch.uint8)
            self._staged = whole[:nbytes].view(self._most_at_once, -1)

    @property
    def bytes_written(self) -> int:
        """Bytes written to the file so far."""
        return self._file.bytes_written if self._file else 0

    @property
    def bytes_read(self) -> int:
        """Bytes read from the file so far."""
        return self._file.bytes_read if self._file else 0

    def swap_out(self, number: int, pages: Sequence[int]) -> None:
        """Save a sequence's pages; they may be overwritten when this returns.

        Raises:
            ScratchError: the disk is full or failed; `forget` gives back what was taken.
        """
        assert number not in self._kept, f"sequence {number} is swapped out already"
        most = self._most_in_memory
        if self._file is None or most is None or self._num_in_memory + len(pages) <= most:
            kept = [torch.empty((len(pages), *row.shape[1:]), dtype=row.dtype) for row in self._rows]
            for some in self._at_once(len(pages)):
                chosen = self._index(pages[some])
                for row, part in zip(self._rows, kept, strict=True):
                    part[some] = row[chosen].cpu()
            self._kept[number] = kept
            self._num_in_memory += len(pages)
            return
        places = self._file.take(len(pages))
        self._kept[number] = _InFile(places)  # before anything can fail: `forget` frees the places
        for some in self._at_once(len(pages)):
            chosen = self._index(pages[some])
            for row, columns in self._columns():
                self._staged[: len(chosen), columns] = row[chosen].view(torch.uint8).cpu()
            self._file.write(places[some], self._memory(len(chosen)))

    def swap_in(self, number: int, pages: Sequence[int]) -> None:
        """Restore the last ``len(pages)`` pages that were swapped out into ``pages``; those before were found.

        Raises:
            ScratchError: the disk failed.
        """
        kept = self._kept[number]
        if pages and isinstance(kept, _InFile):
            self._read(kept.places[-len(pages) :], pages)
        elif pages:
            assert not isinstance(kept, _InFile)
            for some in self._at_once(len(pages)):
                chosen = self._index(pages[some])
                for row, part in zip(self._rows, kept, strict=True):
                    row[chosen] = part[-len(pages) :][some].to(row.device)
        self.forget(number)

    def forget(self, number: int) -> None:
        """Drop the saved pages of a sequence, if any."""
        kept = self._kept.pop(number, None)
        if isinstance(kept, _InFile):
            assert self._file is not None
            self._file.give_back(kept.places)
        elif kept is not None:
            self._num_in_memory -= len(kept[0])

    def close(self) -> None:
        """Free memory and file; may be called again."""
        self._rows = ()
        self._kept.clear()
        if self._file is not None:
            self._file.close()
            self._staged = torch.empty((0, 0), dtype=torch.uint8)

    def _read(self, places: Sequence[int], pages: Sequence[int]) -> None:
        assert self._file is not None
        for some in self._at_once(len(pages)):
            chosen = self._index(pages[some])
            self._file.read(places[some], self._memory(len(chosen)))
            for row, columns in self._columns():
                part = self._staged[: len(chosen), columns].clone(memory_format=torch.contiguous_format)
                row[chosen] = part.view(row.dtype).to(row.device)

    def _columns(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the tensors, and the columns of each one's bytes within a page's place in the file."""
        begin = 0
        for row in self._rows:
            yield row, slice(begin, begin + _row_bytes(row))
            begin += _row_bytes(row)

    def _at_once(self, count: int) -> Iterator[slice]:
        for begin in range(0, count, self._most_at_once):
            yield slice(begin, min(begin + self._most_at_once, count))

    def _memory(self, count: int) -> memoryview:
        return self._staged[:count].numpy().data.cast("B")

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return send(pages, torch.int64, self._rows[0].device)


def _row_bytes(row: torch.Tensor) -> int:
    return row.shape[1] * row.dtype.itemsize
