"""Read rows in the OpenAI format: lines of a batch file for `/v1/chat/completions` or `/v1/completions`.

Defaults are the job's own, except the temperature, which is 1 as at OpenAI. A negative seed is reinterpreted as an
unsigned 64-bit number. OpenAI fields that zinfer does not support are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import field_error
from zinfer.requests.sampling_params import FIELDS, SamplingParams

_NAMES: Final = {
    **{name: name for name in FIELDS if name not in ("max_new_tokens", "min_new_tokens")},
    **{"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"},
}
"""Body fields that `SamplingParams` validates, including vLLM's extensions; each url reads `logprobs` itself."""

_NOT_SUPPORTED: Final = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "suffix", "stream_options"),
        *("audio", "modalities", "prediction", "verbosity", "web_search_options"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    }
)
"""OpenAI fields that are refused unless null."""


@dataclass(frozen=True)
class OpenAIForm:
    """The fields of a body that its output row repeats. `model`: None if the body names none."""

    is_chat: bool
    model: str | None


class _Line(BaseModel):
    """The fields around a body; `custom_id` is checked when the line is parsed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: Any
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    id: Annotated[None, Field(description="left out beside a 'custom_id'")] = None


class _TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]


class _Body(BaseModel):
    """Body fields of both urls, besides those that `SamplingParams` validates. Null means not given.

    `user`, `metadata`, `store` and `service_tier` have no effect.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    stream: Literal[False] | None = None
    response_format: _TextFormat | None = None


class _ChatBody(_Body):
    messages: list[Any]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "_ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class _CompletionBody(_Body):
    prompt: Any
    logprobs: Any = None
    echo: Literal[False] | None = None
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        one = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
        if isinstance(one, str) or (isinstance(one, list) and all(type(part) is int for part in one)):
            return one
        raise ValueError("must be one text or one list of token ids (give each of several prompts a row of its own)")


def read_request(record: Mapping[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """Convert a line with a ``custom_id`` to the fields of a `Row`, without its id.

    Args:
        max_new_tokens: default if the line does not set it.

    Raises:
        ConfigError: names the invalid field.
    """
    kind: type[_Line | _ChatBody | _CompletionBody] = _Line
    try:
        line = _Line.model_validate(record)
        kind = _ChatBody if line.url == "/v1/chat/completions" else _CompletionBody
        body = kind.model_validate(line.body)
    except ValidationError as error:
        raise ConfigError(field_error(error, kind)) from None
    if isinstance(body, _ChatBody):
        names = ("messages", "chat_template_kwargs", "reasoning_effort")
        source = {name: getattr(body, name) for name in names}
        params = _params(body, (body.top_logprobs or 0) if body.logprobs else None, max_new_tokens)
    else:
        source = {"prompt" if isinstance(body.prompt, str) else "prompt_token_ids": body.prompt}
        params = _params(body, body.logprobs, max_new_tokens)
        if body.best_of not in (None, params.n):
            raise ConfigError(f"best_of must be equal to n, which is {params.n}, not {body.best_of}")
    return {**source, "params": params, "openai": OpenAIForm(kind is _ChatBody, body.model)}


def _params(body: _Body, logprobs: Any, max_new_tokens: int | None) -> SamplingParams:
    sampled = dict(body.model_extra or {})
    for name in _NOT_SUPPORTED.intersection(sampled):
        if sampled.pop(name) is not None:
            raise ConfigError(f"{name} is not supported; leave it out")
    if type(seed := sampled.get("seed")) is int and -(2**63) <= seed < 0:
        sampled["seed"] = seed + 2**64
    sampled["logprobs"] = logprobs
    defaults = {"max_new_tokens": max_new_tokens, "temperature": 1.0}
    return SamplingParams.from_mapping(sampled, defaults=defaults, beside=list(type(body).model_fields), names=_NAMES)
