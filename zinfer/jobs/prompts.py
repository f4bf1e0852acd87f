"""Rows to token ids: the tokenizer, the chat template, and the check that prompt and new tokens fit the model.

Prompts get the tokenizer's own special tokens; a chat template writes its own. A prompt of no tokens becomes the
tokenizer's first token (bos), or an error row where it has none.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.jobs.index import RowIndex
from zinfer.jobs.rows import BadRow, Line, Row, RowId, id_key, parse_line, read_lines, row_of
from zinfer.requests.bad_words import find_bad_word_ids
from zinfer.requests.chat_templates import ChatTemplates
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_encoder import encode_chat, encode_text, find_tokenizer
from zinfer.requests.sampling_params import SamplingParams

_STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

NO_TOKENIZER: Final = (
    "put the model's tokenizer files into it, or give rows 'prompt_token_ids' alone, without stop strings and bad words"
)


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


class PromptMaker:
    """Makes prompts for one model.

    tokenizer: None where there is none; rows are token ids then.
    limits: of a row.
    generates: whether anything comes after prompts.
    now: what a chat template takes for the present, with its time zone; it must stay the same for a whole job, on
        whatever day it ends. Only templates that call `strftime_now` with a format computed at run time still see the
        clock.
    """

    def __init__(
        self,
        tokenizer: Any,
        limits: LengthLimits,
        vocab_size: int,
        max_new_tokens: int | None,
        *,
        generates: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.vocab_size = vocab_size
        self.max_new_tokens = max_new_tokens
        self.generates = generates
        self.now = datetime.now().astimezone()
        self._templates = ChatTemplates()

    def close(self) -> None:
        """End the process that renders chats, if there is one."""
        self._templates.close()

    @classmethod
    def from_folder(
        cls, folder: Path, limits: LengthLimits, vocab_size: int, max_new_tokens: int | None, *, generates: bool = True
    ) -> "PromptMaker":
        """Loads the tokenizer that lies in the model's folder, if there is one; nothing is downloaded.

        Raises:
            CheckpointError: the folder holds a tokenizer that does not load.
        """
        return cls(find_tokenizer(folder), limits, vocab_size, max_new_tokens, generates=generates)

    @property
    def template_hash(self) -> str:
        """Identifies the chat template, "none" where there is none."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return "none" if template is None else hashlib.sha256(repr(template).encode()).hexdigest()

    def finds_usable_row(self, index: RowIndex) -> bool:
        """Whether any row of the input can be computed."""
        return any(isinstance(self.prompt_of(line, index)[1], Prompt) for line in read_lines(index.path))

    def prompt_of(self, line: Line, index: RowIndex) -> tuple[RowId, Prompt | BadRow]:
        """The prompt of an input line, or the error that its output row will carry."""
        parsed = parse_line(line)
        row_id = index.id_of(parsed)
        row = row_of(parsed, row_id, self.max_new_tokens)
        return row_id, row if isinstance(row, BadRow) else self.prompt(row, line.number)

    def prompt(self, row: Row, line_number: int) -> Prompt | BadRow:
        """Tokenizes a row and checks its length."""
        try:
            token_ids = self._encode(row)
            row.params.check_vocabulary(self.vocab_size)
            bad_word_ids = find_bad_word_ids(self.tokenizer, row.params.bad_words, self.vocab_size)
        except (ConfigError, ValueError, TypeError) as error:
            return row.bad(line_number, str(error))
        if not self.generates and (row.openai or row.params != SamplingParams(max_new_tokens=self.max_new_tokens)):
            return row.bad(line_number, "nothing is generated in this job; give a source and an id alone")
        params = row.params.within(self.limits.most_new(len(token_ids)))
        problem = self._token_problem(row, token_ids) or self.limits.problem(len(token_ids), params.most_new_tokens)
        if problem:
            return row.bad(line_number, problem)
        if params is not row.params:
            row = row.model_copy(update={"params": params})
        return Prompt(row, tuple(token_ids), line_number, bad_word_ids)

    def _encode(self, row: Row) -> list[int]:
        if self.tokenizer is None and row.needs_tokenizer:
            raise ConfigError(f"the model's folder has no tokenizer; {NO_TOKENIZER}")
        if row.prompt_token_ids is not None:
            return list(row.prompt_token_ids)
        if row.prompt is not None:
            return encode_text(self.tokenizer, row.prompt)
        assert row.messages is not None
        if self.tokenizer.chat_template is None:
            raise ConfigError("messages: the model's tokenizer has no chat template; give 'prompt' instead")
        return encode_chat(
            self.tokenizer, row.messages, self._templates, self._frozen_template(), row.template_variables
        )

    def _frozen_template(self) -> str:
        """The chat template with each `strftime_now("...")` replaced by what it gives at `now`."""
        template: str = self.tokenizer.get_chat_template()
        now = self.now.replace(tzinfo=None)  # as strftime_now has it: %Z and %z are empty
        return _STRFTIME_NOW.sub(lambda call: json.dumps(now.strftime(call[2])), template)

    def _token_problem(self, row: Row, token_ids: Sequence[int]) -> str | None:
        field = "prompt_token_ids" if row.openai is None else "prompt"
        if not token_ids:
            return f"{field}: it has no tokens; give one at least"
        largest = max(token_ids)
        if row.prompt_token_ids is not None and not 0 <= min(token_ids) <= largest < self.vocab_size:
            return f"{field}: token ids are whole numbers from 0 to {self.vocab_size - 1}"
        if largest < self.vocab_size:
            return None
        return (
            f"the tokenizer gives token {largest}, but the model's vocabulary ends at {self.vocab_size - 1}; "
            "the tokenizer is another model's, or a token was added to it alone"
        )
