"""Input rows: one JSON object a line, read lazily and validated strictly.

`openai_batch` reads lines with a `custom_id`, which are in the OpenAI format. An invalid line becomes a `BadRow` with
the reason; it never ends the job. Columns of the user's own are kept for the output row; one that is nearly the name of
a field is invalid, so a mistyped `temperture` does not become a greedy row.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from zinfer.errors import ConfigError
from zinfer.jobs.openai_batch import BODY_FIELDS, OpenAIForm, read_request
from zinfer.jobs.row_form import FIELDS_OF_LINES, FIELDS_OF_ROWS, SOURCES, RowForm
from zinfer.requests.client_names import FieldError
from zinfer.requests.field_errors import MESSAGES, field_error, short
from zinfer.requests.json_object import SURROGATE, check_unicode, read_object
from zinfer.requests.prompt_encoder import template_variables
from zinfer.requests.sampling_params import FIELDS, OTHER_SPELLINGS, SamplingParams, as_tuple

RowId = str | int

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_COLUMNS = frozenset((*FIELDS_OF_LINES, *FIELDS_OF_ROWS, *BODY_FIELDS))  # beside a body


class Row(BaseModel):
    """One valid line.

    `id` defaults to the line number; `openai` is None in the job's own format. `kept`: columns for the output row.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    id: Annotated[RowId, Field(description="a text or a whole number")]
    prompt: str | None = None
    messages: Annotated[tuple[dict[str, Any], ...] | None, Field(description=MESSAGES)] = None
    prompt_token_ids: Annotated[
        tuple[int, ...] | None, BeforeValidator(as_tuple), Field(description="a list of token ids, whole numbers")
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    params: SamplingParams = SamplingParams()
    openai: OpenAIForm | None = None
    kept: dict[str, Any] = {}

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        for number, message in enumerate(value, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"message {number} must be an object with a string 'role'")
            if "content" not in message and "tool_calls" not in message:
                raise ValueError(f"message {number} has no 'content'")
        if not value:
            raise ValueError("must hold at least one message")
        return tuple(value)

    @model_validator(mode="after")
    def _one_source(self) -> "Row":
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(map(repr, SOURCES))}, and only one")
        if self.messages is None and (self.chat_template_kwargs is not None or self.reasoning_effort is not None):
            raise ValueError("reasoning_effort and chat_template_kwargs go with 'messages' alone")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides the messages."""
        return template_variables(self.chat_template_kwargs, self.reasoning_effort)

    @property
    def shows_tokens(self) -> bool:
        """Whether its output row shows single tokens as text."""
        form = self.openai
        return form is not None and (self.params.logprobs is not None or form.echoes or form.tools is not None)

    def bad(self, line_number: int, problem: str, fault: "Fault | None" = None) -> "BadRow":
        """Return the error row for a problem found later; ``fault``: unless it is an invalid request."""
        form = self.openai
        if fault is not None:
            return BadRow(self.id, f"line {line_number}: {problem}", form is not None, fault=fault, kept=self.kept)
        error = ConfigError(problem) if form is None else form.names.error(problem)
        return bad_row(self.id, line_number, error, is_openai=form is not None, kept=self.kept)


@dataclass(frozen=True)
class Fault:
    """How a row in the OpenAI format tells an error: its response's status, the field, and OpenAI's word for it."""

    status: int = 400
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class BadRow:
    """An invalid line, and why.

    `message` names line and field. `is_openai`: it has a valid `custom_id`. `is_malformed`: invalid for any model.
    `field`: the one of OpenAI's body that is wrong, if it is one. `kept`: columns for the output row.
    """

    id: RowId
    message: str
    is_openai: bool = False
    is_malformed: bool = False
    fault: Fault = Fault()
    kept: Mapping[str, Any] = field(default_factory=dict)


class RowState(IntEnum):
    """State of a row in the output: missing, completed or failed. Stored in one byte."""

    MISSING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True)
class Line:
    """One line of the input that is not blank, undecoded. `number` counts all lines from 1."""

    number: int
    data: bytes


@dataclass(frozen=True)
class Parsed:
    """The JSON of a line and the id that it sets, None if it sets none. An unreadable line has a `problem`, and no
    `record`.
    """

    line: int
    record: dict[str, Any] | None = None
    problem: str | None = None
    own_id: RowId | None = None

    @property
    def is_openai(self) -> bool:
        """Whether the line is in the OpenAI format, so that its output row can be too."""
        return self.record is not None and "custom_id" in self.record

    @property
    def id(self) -> RowId:
        """The row's own id, or its line number."""
        return self.line if self.own_id is None else self.own_id


def read_lines(path: Path) -> Iterator[Line]:
    """Iterate over the lines of a file that are not blank."""
    with path.open("rb") as file:
        yield from lines_of(file)


def lines_of(file: Iterable[bytes]) -> Iterator[Line]:
    """Iterate over the lines of an open file that are not blank."""
    for number, data in enumerate(file, start=1):
        content = data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data
        if content.strip():
            yield Line(number, content)


def id_key(row_id: RowId) -> int:
    """Return a 64-bit hash of an id, the same in every process; the number 1 and the string "1" differ."""
    return int.from_bytes(hashlib.blake2b(json.dumps(row_id).encode(), digest_size=8).digest(), "little")


def parse_line(line: Line) -> Parsed:
    """Parse a line's JSON and its id; `row_of` validates the other fields."""
    try:
        record = read_object(line.data, "the line")
    except ConfigError as error:
        return Parsed(line.number, None, str(error))
    name, allowed = ("custom_id", "a string") if "custom_id" in record else ("id", "a string or a whole number")
    own_id = record.get(name)
    if name == "id" and own_id is None:
        return Parsed(line.number, record)
    if type(own_id) is not str and not (name == "id" and type(own_id) is int):
        return Parsed(line.number, None, f"{name} must be {allowed}, not {short(own_id)}")
    if SURROGATE.search(str(own_id)):
        return Parsed(line.number, None, f"{name} holds half of a surrogate pair")
    return Parsed(line.number, record, None, own_id)


def row_of(parsed: Parsed, row_id: RowId, form: RowForm) -> Row | BadRow:
    """Return the validated row, or its error."""
    problem, kept = ConfigError(parsed.problem), dict[str, Any]()
    if parsed.record is not None:
        try:
            kept = form.kept(parsed.record)
            return _read_row(parsed.record, parsed.is_openai, row_id, form, kept)
        except ConfigError as error:
            problem = error
    return bad_row(row_id, parsed.line, problem, is_openai=parsed.is_openai, is_malformed=True, kept=kept)


def bad_row(
    row_id: RowId,
    line_number: int,
    problem: ConfigError,
    *,
    is_openai: bool,
    is_malformed: bool = False,
    kept: Mapping[str, Any],
) -> BadRow:
    """Return the error row of a line for a problem."""
    field = problem.field if is_openai and isinstance(problem, FieldError) else None
    return BadRow(row_id, f"line {line_number}: {problem}", is_openai, is_malformed, Fault(param=field), kept)


def _read_row(record: Mapping[str, Any], is_openai: bool, row_id: RowId, form: RowForm, kept: Mapping[str, Any]) -> Row:
    """Return the validated row. Raises ConfigError."""
    fields = (_openai_fields if is_openai else _own_fields)(record, form)
    try:
        row = Row.model_validate({"id": row_id, "kept": kept, **fields})
    except ValidationError as error:
        openai, message = fields.get("openai"), field_error(error, Row)
        raise (ConfigError(message) if openai is None else openai.names.error(message)) from None
    check_unicode(record)
    if form.seed is not None and row.params.seed is None:
        seed = id_key(f"{form.seed} {json.dumps(row_id)}")
        row = row.model_copy(update={"params": replace(row.params, seed=seed)})
    return row


def _own_fields(record: Mapping[str, Any], form: RowForm) -> dict[str, Any]:
    """Convert a row in the job's own format to the fields of a `Row`, without its id. Raises ConfigError."""
    if record.keys() >= {"method", "url", "body"}:
        raise ConfigError("a row of an OpenAI batch needs a 'custom_id', a string, as its id")
    form.check_names(record)
    sampling = {name: record[name] for name in (*FIELDS, *OTHER_SPELLINGS) if name in record}
    defaults = {**form.sampling, "max_new_tokens": form.max_new_tokens}
    return {**form.source(record), "params": SamplingParams.from_mapping(sampling, defaults=defaults)}


def _openai_fields(record: Mapping[str, Any], form: RowForm) -> dict[str, Any]:
    """Convert a row in the OpenAI format to the fields of a `Row`, without its id. Raises ConfigError.

    A field of the body that is given beside it is not kept as a column: it would have no effect.
    """
    form.check_names(record)
    line = {name: value for name, value in record.items() if name in _NO_COLUMNS}
    if isinstance(body := line.get("body"), dict):
        line["body"] = form.body(body, is_chat=line.get("url") == "/v1/chat/completions")
    return read_request(line, form.max_new_tokens)
