"""Cuts the input into batches that depend on the input and the batch size alone, never on what is done already.

What shares a batch can change a row's last floating-point bits, and so its tokens. Since a batch is always made of the
same rows, a job that was killed and begun again writes the very bytes that it would have written.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zinfer.errors import JobError
from zinfer.jobs.index import RowIndex
from zinfer.jobs.output import RowState
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import BadRow, Line, RowId

# Bounds the memory of an input with long runs of unusable rows.
_MAX_BAD_ROWS = 1024

PreparedRow = tuple[RowId, Prompt | BadRow]
Prepare = Callable[[Line, RowIndex], PreparedRow]


@dataclass(frozen=True)
class Batch:
    """Neighbouring rows of the input, at most `batch_size` of them prompts.

    missing: what the output still lacks, in the input's order, with each row's ordinal.
    prompts: what is computed together. Those that are done already are computed again for their neighbours' sake.
        Empty where only error rows are missing.
    """

    missing: tuple[tuple[int, Prompt | BadRow], ...]
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class _Slot:
    """A row of the batch being gathered; `item` is None for a row that is in the output and was not looked at."""

    ordinal: int
    line: Line
    item: Prompt | BadRow | None


class BatchCutter:
    """Walks the input and hands out the batches that still miss rows."""

    def __init__(self, index: RowIndex, states: bytearray, batch_size: int, prepare: Prepare) -> None:
        """states: [num_rows] RowState by ordinal."""
        self._index = index
        self._states = states
        self._batch_size = batch_size
        self._prepare = prepare

    def __iter__(self) -> Iterator[Batch]:
        slots: list[_Slot] = []
        num_prompts = 0
        for slot in self._slots():
            slots.append(slot)
            num_prompts += self._is_prompt(slot)
            if num_prompts == self._batch_size or len(slots) - num_prompts == _MAX_BAD_ROWS:
                yield from self._close(slots)
                slots = []
                num_prompts = 0
        yield from self._close(slots)

    def _is_prompt(self, slot: _Slot) -> bool:
        if self._states[slot.ordinal] == RowState.DONE:
            return True
        # A row that failed may have been one all the same, whose completion failed.
        return isinstance(self._item(slot.line) if slot.item is None else slot.item, Prompt)

    def _slots(self) -> Iterator[_Slot]:
        for ordinal, line in enumerate(self._lines()):
            is_written = self._states[ordinal] != RowState.MISSING
            yield _Slot(ordinal, line, None if is_written else self._item(line))

    def _lines(self) -> Iterator[Line]:
        try:
            yield from self._index.lines()
        except OSError as error:
            raise JobError(
                f"input {self._index.path} cannot be read: {error.strerror} (errno {error.errno}). The rows in the "
                "output are kept; run the same command again to go on"
            ) from error

    def _close(self, slots: list[_Slot]) -> Iterator[Batch]:
        missing = tuple((slot.ordinal, slot.item) for slot in slots if slot.item is not None)
        if not missing:
            return
        prompts: list[Prompt] = []
        if any(isinstance(item, Prompt) for _, item in missing):
            items = (self._item(slot.line) if slot.item is None else slot.item for slot in slots)
            prompts += [item for item in items if isinstance(item, Prompt)]
        yield Batch(missing, tuple(prompts))

    def _item(self, line: Line) -> Prompt | BadRow:
        return self._prepare(line, self._index)[1]
