"""Read rows in the OpenAI format: lines of a batch file for `/v1/chat/completions` or `/v1/completions`.

Defaults are the job's own, except those that `zinfer.requests.openai_body` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zinfer.errors import ConfigError
from zinfer.requests.client_names import ClientNames, FieldError
from zinfer.requests.field_errors import field_error
from zinfer.requests.openai_body import ChatBody, CompletionBody, read_body
from zinfer.requests.tools import ToolUse


@dataclass(frozen=True)
class OpenAIForm:
    """What an output row needs of a body. `model`: None if the body names none. `names`: those that errors have.

    keeps_special: whether special tokens are content, beside calls of tools.
    """

    is_chat: bool
    model: str | None
    names: ClientNames
    echoes: bool = False
    tools: ToolUse | None = None
    keeps_special: bool = False


class _Line(BaseModel):
    """The fields around a body; `custom_id` is checked when the line is parsed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: Any
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    id: Annotated[None, Field(description="left out beside a 'custom_id'")] = None


class _ChatRow(ChatBody):
    priority: Annotated[None, Field(description="left out: a batch's rows start in order")] = None
    stream: Annotated[Literal[False] | None, Field(description="false or left out: a row has one answer")] = None


class _CompletionRow(CompletionBody):
    priority: Annotated[None, Field(description="left out: a batch's rows start in order")] = None
    stream: Annotated[Literal[False] | None, Field(description="false or left out: a row has one answer")] = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        one = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
        if isinstance(one, str) or (isinstance(one, list) and all(type(part) is int for part in one)):
            return one
        raise ValueError("must be one text or one list of token ids (give each of several prompts a row of its own)")


BODY_FIELDS = frozenset((*_ChatRow.model_fields, *_CompletionRow.model_fields))
"""The fields of bodies: beside a body they would have no effect."""


def read_request(record: Mapping[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """Convert a line with a ``custom_id`` to the fields of a `Row`, without its id.

    Args:
        max_new_tokens: default if the line does not set it.

    Raises:
        ConfigError: names the invalid field.
    """
    try:
        line = _Line.model_validate(record)
    except ValidationError as error:
        raise ConfigError(field_error(error, _Line)) from None
    if line.body.get("stream_options") is not None:
        raise FieldError("stream_options is not supported; leave it out", "stream_options")
    if line.url == "/v1/chat/completions":
        return _chat_fields(read_body(_ChatRow, line.body), max_new_tokens)
    return _completion_fields(read_body(_CompletionRow, line.body), max_new_tokens)


def _chat_fields(body: _ChatRow, max_new_tokens: int | None) -> dict[str, Any]:
    source = {name: getattr(body, name) for name in ("messages", "chat_template_kwargs", "reasoning_effort")}
    with body.names.told():
        form = OpenAIForm(True, body.model, body.names, tools=body.tool_use, keeps_special=body.keeps_special)
        return {**source, "params": body.params(max_new_tokens), "openai": form}


def _completion_fields(body: _CompletionRow, max_new_tokens: int | None) -> dict[str, Any]:
    source = {"prompt" if isinstance(body.prompt, str) else "prompt_token_ids": body.prompt}
    form = OpenAIForm(False, body.model, body.names, echoes=bool(body.echo))
    with body.names.told():
        return {**source, "params": body.params(max_new_tokens), "openai": form}
