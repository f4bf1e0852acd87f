"""Rows to prompts, and prompts to batches that depend on the input and the batch size alone, never on what is done.

What shares a batch can change a row's last floating-point bits, and so its tokens. Since a batch is always made of the
same rows, a job that was killed and begun again writes the very bytes that it would have written.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zinfer.errors import ConfigError, JobError
from zinfer.jobs.index import RowIndex
from zinfer.jobs.rows import BadRow, Line, Row, RowState, id_key, parse_line, read_lines, row_of
from zinfer.requests.prompt_encoder import NO_TOKENIZER, PromptEncoder, PromptLike
from zinfer.requests.sampling_params import SamplingParams

# Bounds the memory of an input with long runs of unusable rows.
_MAX_BAD_ROWS = 1024


@dataclass(frozen=True)
class Prompt:
    """A row ready to compute, from the input's line ``line``. ``params`` have the row's seed, or one that its id alone
    decides. ``bad_word_ids`` are the tokens of each of its bad words.
    """

    row: Row
    token_ids: tuple[int, ...]
    line: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def params(self) -> SamplingParams:
        params = self.row.params
        return params if params.seed is not None else replace(params, seed=id_key(self.row.id))

    @property
    def max_new_tokens(self) -> int:
        return self.row.params.most_new_tokens


class PromptReader:
    """Turns the rows of one input into prompts.

    Args:
        max_new_tokens: of rows that do not say.
        generates: whether anything comes after prompts.
    """

    def __init__(
        self, encoder: PromptEncoder, index: RowIndex, max_new_tokens: int | None = None, *, generates: bool = True
    ) -> None:
        self.index = index
        self._encoder = encoder
        self._max_new_tokens = max_new_tokens
        self._generates = generates

    def has_usable_row(self) -> bool:
        """Return whether any row of the input can be computed."""
        return any(isinstance(self.read(line), Prompt) for line in read_lines(self.index.path))

    def read(self, line: Line) -> Prompt | BadRow:
        """Return the prompt of an input line, or the error that its output row will have."""
        parsed = parse_line(line)
        row = row_of(parsed, self.index.id_of(parsed), self._max_new_tokens)
        return row if isinstance(row, BadRow) else encoded(row, line.number, self._encoder, self._problem(row))

    def _problem(self, row: Row) -> str | None:
        if not self._generates and (row.openai or row.params != SamplingParams(max_new_tokens=self._max_new_tokens)):
            return "nothing is generated in this job; give a source and an id alone"
        return None


def encoded(row: Row, line_number: int, encoder: PromptEncoder, problem: str | None = None) -> Prompt | BadRow:
    """Return a row with its tokens, or with the first problem of it."""
    source: PromptLike | None = row.prompt if row.prompt is not None else row.messages
    if source is None:
        source = {"prompt_token_ids": row.prompt_token_ids}
    try:
        if encoder.tokenizer is None and row.shows_tokens:
            raise ConfigError(f"the model's folder has no tokenizer; {NO_TOKENIZER}")
        token_ids, params = encoder.encode(source, row.params, row.template_variables)
        bad_word_ids = encoder.bad_word_ids(params)
        if problem:
            raise ConfigError(problem)
    except ConfigError as error:
        return row.bad(line_number, str(error))
    if params is not row.params:
        row = row.model_copy(update={"params": params})
    return Prompt(row, tuple(token_ids), line_number, bad_word_ids)


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

    def __init__(self, reader: PromptReader, states: bytearray, batch_size: int) -> None:
        """states: [num_rows] RowState by ordinal."""
        self._index = reader.index
        self._states = states
        self._batch_size = batch_size
        self._item = reader.read

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
