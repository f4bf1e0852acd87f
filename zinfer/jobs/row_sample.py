"""Rows from all over an input, by which a job is planned before any of it is computed."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final

from zinfer.jobs.prompts import Prompt, PromptReader
from zinfer.jobs.rows import BadRow, read_lines
from zinfer.planning.job_plan import Job

_NUM_SAMPLED: Final = 512
"""At least so many rows, if there are as many, and less than twice as many."""


@dataclass(frozen=True)
class RowSample:
    """Rows that stand for an input.

    Attributes:
        num_rows: of the input.
        rows: in its order, evenly spread.
    """

    num_rows: int
    rows: tuple[Prompt | BadRow, ...]

    @classmethod
    def read(cls, reader: PromptReader) -> "RowSample":
        """Take every n-th row. The file is read once more, since lines have no places of their own.

        Raises:
            OSError: it cannot be read.
        """
        index = reader.index
        step = max(index.num_rows // _NUM_SAMPLED, 1)
        return cls(index.num_rows, tuple(map(reader.read, islice(read_lines(index.path), 0, None, step))))

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """The rows that can be used."""
        return tuple(row for row in self.rows if isinstance(row, Prompt))

    @cached_property
    def bad(self) -> tuple[BadRow, ...]:
        """The rows that cannot be used."""
        return tuple(row for row in self.rows if isinstance(row, BadRow))

    @property
    def num_read(self) -> int:
        """Number of rows that were taken."""
        return len(self.rows)

    def ordinals(self, place: int) -> tuple[int, int]:
        """Return the first ordinal of the input that a sampled row stands for, and the one behind the last."""
        return place * self.num_rows // self.num_read, (place + 1) * self.num_rows // self.num_read

    def job(self) -> Job:
        """Return the job of the whole input, without rows that will fail; each of several samples of a row is a row.

        Raises:
            ConfigError: no row can be used.
        """
        several = [prompt for prompt in self.prompts for _ in range(prompt.params.n)]
        num_sequences = round(self.num_rows * len(several) / max(self.num_read, 1))
        return Job(num_sequences, [len(each.token_ids) for each in several], [each.max_new_tokens for each in several])
