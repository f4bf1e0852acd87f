"""How the rows of an input become requests: their fields, the columns of the user's own, and the options of a job."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from string import Formatter
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import misspelling, short
from zinfer.requests.sampling_params import FIELDS, OTHER_SPELLINGS, SamplingParams

SOURCES: Final = ("prompt", "messages", "prompt_token_ids")
_FIELDS: Final = (*SOURCES, "chat_template_kwargs", "reasoning_effort")
FIELDS_OF_ROWS: Final = ("id", *_FIELDS, *FIELDS, *OTHER_SPELLINGS)
"""The fields of a row in the job's own format."""
TEXT_FIELDS: Final = ("stop", "bad_words")
"""Those that are a text or a list of texts."""
FIELDS_OF_LINES: Final = ("custom_id", "method", "url", "body")
"""The fields of a row in the OpenAI format."""
_RESULTS: Final = frozenset((
    "id", "custom_id", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs", "outputs",
    "num_prompt_tokens", "num_output_tokens", "embedding", "label", "scores", "response", "error",
))  # fmt: skip
"""The fields of output rows."""


@dataclass(frozen=True)
class RowForm:
    """How the rows of an input become requests. A row's own fields come before these.

    Attributes:
        max_new_tokens: default for rows that do not set it.
        keep: columns to copy to the output row, the fields of a row among them; None: all that are no such fields.
        sampling: defaults of other fields of `SamplingParams`.
        seed: rows that set none draw by this one and their ids; None: by their ids alone.
        prompt_column: the column that holds the prompt, or the messages, instead of the fields for them.
        template: the prompt, with columns in braces, instead of the fields for it.
        system: system message of rows that have none; a prompt becomes the message of a user.
    """

    max_new_tokens: int | None = None
    keep: tuple[str, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    prompt_column: str | None = None
    template: str | None = None
    system: str | None = None

    @classmethod
    def of(
        cls, max_new_tokens: int | None, sampling: Mapping[str, Any], keep: Sequence[str] | None, **columns: str | None
    ) -> "RowForm":
        """Return the form by `zinfer.jobs.run_job`'s arguments; None in ``sampling`` is as good as no field."""
        given = {name: value for name, value in sampling.items() if value is not None}
        seed = given.pop("seed", None)
        return cls(max_new_tokens, None if keep is None else tuple(keep), given, seed, **columns)

    def check(self) -> None:
        """Raise ConfigError for values that no row can have."""
        if self.prompt_column is not None and self.template is not None:
            raise ConfigError("prompt_column and template both say what the prompt is; remove one of the two")
        SamplingParams.from_mapping({**self.sampling, "seed": self.seed})
        for _ in self._parts:
            pass

    @property
    def for_generation(self) -> list[str]:
        """The options that only rows with generated tokens use."""
        names = [] if self.max_new_tokens is None else ["max_new_tokens"]
        return names + list(self.sampling) + ([] if self.seed is None else ["seed"])

    def document(self) -> dict[str, str | int]:
        """Return what changes the rows' bytes, but for `max_new_tokens`; nothing by default."""
        found: dict[str, str | int] = {name: json.dumps(value) for name, value in self.sampling.items()}
        named = {"seed": self.seed, "prompt_column": self.prompt_column, "template": self.template}
        found |= {name: value for name, value in {**named, "system": self.system}.items() if value is not None}
        return found if self.keep is None else found | {"keep": ",".join(self.keep) or "none"}

    def source(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a row that say what the prompt is. Raises ConfigError."""
        found = {name: record[name] for name in _FIELDS if name in record}
        if self.prompt_column is not None or self.template is not None:
            for name in SOURCES:
                found.pop(name, None)
            value = self._made(record) if self.prompt_column is None else _column(record, self.prompt_column)
            found["messages" if isinstance(value, list) else "prompt"] = value
        return self._with_system(found)

    def body(self, body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
        """Return the body of a request in OpenAI's format with these defaults. Raises ConfigError."""
        given = {name: value for name, value in body.items() if value is not None or name not in self.sampling}
        if self.system is None:
            return {**self.sampling, **given}
        if not is_chat:
            raise ConfigError("system is for chats, not for /v1/completions")
        return {**self.sampling, **self._with_system(given)}

    def _with_system(self, found: dict[str, Any]) -> dict[str, Any]:
        if self.system is None:
            return found
        begin = {"role": "system", "content": self.system}
        if isinstance(prompt := found.get("prompt"), str) and found.get("messages") is None:
            left = {name: value for name, value in found.items() if name != "prompt"}
            return {**left, "messages": [begin, {"role": "user", "content": prompt}]}
        if found.get("prompt_token_ids") is not None:
            raise ConfigError("system is for 'prompt' and 'messages', not for 'prompt_token_ids'")
        if isinstance(messages := found.get("messages"), list):
            first = messages[0] if messages else None
            if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
                return {**found, "messages": [begin, *messages]}
        return found

    def _made(self, record: Mapping[str, Any]) -> str:
        """Return the template with the columns of a row."""
        values = ((text, None if name is None else _column(record, name)) for text, name in self._parts)
        return "".join(
            text + ("" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for text, value in values
        )

    @cached_property
    def _parts(self) -> tuple[tuple[str, str | None], ...]:
        """The texts of the template, each with the column behind it."""
        try:
            parts = tuple(Formatter().parse(self.template or ""))
        except ValueError as error:
            raise ConfigError(f"template {short(self.template)}: {error}; {{{{ and }}}} stand for braces") from None
        for _, name, form, conversion in parts:
            if name == "" or form or conversion:
                raise ConfigError(
                    f"template {short(self.template)}: give a column's name alone in braces, such as {{question}}; "
                    "{{ and }} stand for braces"
                )
        return tuple((text, name) for text, name, _, _ in parts)

    def check_names(self, record: Mapping[str, Any]) -> None:
        """Raise ConfigError for a column that must be a misspelt field, unless the user has named it."""
        named = {*(self.keep or ()), self.prompt_column, *(name for _, name in self._parts)}
        for name in record:
            if name not in named and (problem := _problem_of(name, "custom_id" in record)):
                raise ConfigError(f"{problem} (a column of your own is kept by --keep {name})")

    def kept(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the output row gets, by their names there."""
        if self.keep is None:
            is_openai = "custom_id" in record
            is_line = is_openai or record.keys() >= {*FIELDS_OF_LINES} - {"custom_id"}
            known = (*FIELDS_OF_LINES, *FIELDS_OF_ROWS) if is_line else FIELDS_OF_ROWS
            names = [name for name in record if name not in known and _problem_of(name, is_openai) is None]
        else:
            names = [name for name in self.keep if name in record and name not in ("id", "custom_id")]
        return {kept_name(name): record[name] for name in names}


def _column(record: Mapping[str, Any], name: str) -> Any:
    if (value := record.get(name)) is None:
        raise ConfigError(f"the row has no column {name!r}; its columns are {', '.join(record) or 'none'}")
    return value


@lru_cache(maxsize=1024)  # the rows of a file have the same columns
def _problem_of(name: str, is_openai: bool) -> str | None:
    """Return what is wrong with the name of a column that must be a misspelt field."""
    known = FIELDS_OF_LINES if is_openai else FIELDS_OF_ROWS
    return None if name in known else misspelling(name, known)


def kept_name(column: str) -> str:
    """Return the name that a column has in output rows: another one if these have a field of that name."""
    return f"input_{column}" if column in _RESULTS else column
