"""Turn rows into prompts, and prompts into batches that depend only on the input and the batch size.

The other rows of a batch can change a row's last floating-point bits, and so its tokens. Batches always consist of the
same rows, so a job that was killed and resumed writes the same bytes as an uninterrupted one.
"""

import queue
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from zinfer.errors import ConfigError, JobError
from zinfer.jobs.index import RowIndex
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.rows import BadRow, Line, Row, RowState, id_key, parse_line, row_of
from zinfer.nvme.pool import start_thread
from zinfer.requests.prompt_encoder import NO_TOKENIZER, PromptEncoder, PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.tool_formats import tool_format_of

# Bounds the memory of an input with long runs of unusable rows.
_MAX_BAD_ROWS = 1024
_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """A row ready to compute, from the input's line ``line``.

    ``params`` have the row's seed, or one derived from its id. ``bad_word_ids``: the tokens of each of its bad words.
    ``written_ids``: the tokens of each of its completions, if the output has them.
    """

    row: Row
    token_ids: tuple[int, ...]
    line: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    written_ids: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def params(self) -> SamplingParams:
        params = self.row.params
        return params if params.seed is not None else replace(params, seed=id_key(self.row.id))

    @property
    def max_new_tokens(self) -> int:
        return max(self.row.params.most_new_tokens, 1)  # one is computed for a prompt that is only scored


class PromptReader:
    """Turns the rows of one input into prompts.

    Args:
        form: how the rows become requests.
        generates: whether the job generates tokens.
        check: returns the error of a valid row, from its line, that is not to be computed; else None.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        index: RowIndex,
        form: RowForm = RowForm(),  # noqa: B008  # frozen
        *,
        generates: bool = True,
        check: Callable[[Row, int], BadRow | None] = lambda row, line_number: None,
    ) -> None:
        self.index = index
        self._encoder, self._check = encoder, check
        self._form, self._generates = form, generates

    def read(self, line: Line) -> Prompt | BadRow:
        """Return the prompt of an input line, or the error for its output row."""
        parsed = parse_line(line)
        row = row_of(parsed, self.index.id_of(parsed), self._form)
        if isinstance(row, BadRow):
            return row
        if (refused := self._check(row, line.number)) is not None:
            return refused
        prompt = encoded(row, line.number, self._encoder)
        if self._generates or isinstance(prompt, BadRow):
            return prompt
        if row.openai or row.params != SamplingParams():
            return row.bad(line.number, "nothing is generated in this job; give a source and an id alone")
        return prompt


def encoded(row: Row, line_number: int, encoder: PromptEncoder) -> Prompt | BadRow:
    """Encode a row, or return its first problem."""
    source: PromptLike | None = row.prompt if row.prompt is not None else row.messages
    if source is None:
        source = {"prompt_token_ids": row.prompt_token_ids}
    try:
        if encoder.tokenizer is None and row.shows_tokens:
            raise ConfigError(f"the model's folder has no tokenizer; {NO_TOKENIZER}")
        use = None if row.openai is None else row.openai.tools
        if use is not None:
            tool_format_of(use, encoder.tokenizer, encoder.chat_template(use.tools))
        tools = None if use is None else use.tools
        token_ids, params = encoder.encode(source, row.params, row.template_variables, tools)
        bad_word_ids = encoder.bad_word_ids(params)
    except ConfigError as error:
        return row.bad(line_number, str(error))
    if params is not row.params:
        row = row.model_copy(update={"params": params})
    return Prompt(row, tuple(token_ids), line_number, bad_word_ids)


@dataclass(frozen=True)
class Batch:
    """Neighbouring rows of the input, at most `batch_size` of them prompts.

    missing: rows that the output lacks, in input order, each with its ordinal.
    prompts: prompts that share passes, including those already done, so that results stay the same, unless only missing
        ones are wanted. Empty if only error rows are missing.
    """

    missing: tuple[tuple[int, Prompt | BadRow], ...]
    prompts: tuple[Prompt, ...]

    @property
    def has_written(self) -> bool:
        """Whether the output has rows of some of the prompts."""
        return len(self.prompts) > sum(isinstance(item, Prompt) for _, item in self.missing)


class BatchCutter:
    """Iterates over the batches that have rows missing from the output.

    Args:
        states: [num_rows] RowState by ordinal.
        only_missing: leave rows that the output has out of the batches.
        written: returns the tokens of a row that is done, by ordinal, as `Prompt.written_ids`.
    """

    def __init__(
        self,
        reader: PromptReader,
        states: bytearray,
        batch_size: int,
        *,
        only_missing: bool = False,
        written: Callable[[int], tuple[tuple[int, ...], ...] | None] = lambda ordinal: None,
    ) -> None:
        self._reader, self._states, self._batch_size = reader, states, batch_size
        self._only_missing, self._written = only_missing, written

    def __iter__(self) -> Iterator[Batch]:
        rows: list[tuple[int, Line, Prompt | BadRow | None]] = []  # None: in the output already
        num_prompts = 0
        for ordinal, line in enumerate(self._lines()):
            state = self._states[ordinal]
            if self._only_missing and state != RowState.MISSING:
                continue
            item = self._reader.read(line) if state != RowState.DONE else None
            # A failed row may still be a prompt: its completion may have failed.
            num_prompts += state == RowState.DONE or isinstance(item, Prompt)
            rows.append((ordinal, line, item if state == RowState.MISSING else None))
            if num_prompts == self._batch_size or len(rows) - num_prompts == _MAX_BAD_ROWS:
                yield from self._close(rows)
                rows, num_prompts = [], 0
        yield from self._close(rows)

    def _lines(self) -> Iterator[Line]:
        index = self._reader.index
        try:
            yield from index.lines()
        except OSError as error:
            raise JobError(
                f"input {index.name} cannot be read: {error.strerror} (errno {error.errno}). The rows in the "
                "output are kept; run the same command again to go on"
            ) from error

    def _close(self, rows: list[tuple[int, Line, Prompt | BadRow | None]]) -> Iterator[Batch]:
        missing = tuple((ordinal, item) for ordinal, _, item in rows if item is not None)
        if not missing:
            return
        prompts: tuple[Prompt, ...] = ()
        if any(isinstance(item, Prompt) for _, item in missing):
            items = (self._again(ordinal, line) if item is None else item for ordinal, line, item in rows)
            prompts = tuple(item for item in items if isinstance(item, Prompt))
        yield Batch(missing, prompts)

    def _again(self, ordinal: int, line: Line) -> Prompt | BadRow:
        """Return the prompt of a row that the output has."""
        item = self._reader.read(line)
        if not isinstance(item, Prompt) or self._states[ordinal] != RowState.DONE:
            return item
        return replace(item, written_ids=self._written(ordinal))


def prefetch_iter(items: Iterable[_T]) -> Generator[_T, None, None]:
    """Iterate over items; another thread prepares the next one. Its exceptions are raised here.

    The thread is a daemon, so an unfinished item does not keep the process from ending.
    """
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    made: queue.SimpleQueue[tuple[_T] | BaseException | None] = queue.SimpleQueue()

    def make() -> None:
        walk = iter(items)
        while asked.get():
            try:
                made.put((next(walk),))
            except StopIteration:
                made.put(None)

    start_thread("zinfer-prefetch-iter", make, made.put)
    try:
        asked.put(True)
        while (coming := made.get()) is not None:
            if isinstance(coming, BaseException):
                raise coming
            asked.put(True)
            yield coming[0]
    finally:
        asked.put(False)
