"""The OpenAI form of a row: a line of a batch file for `/v1/chat/completions` or `/v1/completions`.

Defaults are the job's own but for one: without a temperature a row draws at 1, as at OpenAI, and is not greedy. A
negative seed stands for its 64 bits without a sign. What OpenAI would honour and nothing here does is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zinfer.errors import ConfigError
from zinfer.requests.sampling_params import OTHER_SPELLINGS, SamplingParams, nearest_field

_CHAT: Final = "/v1/chat/completions"
_SPELLINGS: Final = {**OTHER_SPELLINGS, "max_completion_tokens": "max_new_tokens"}
_SAMPLED: Final = (
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),  # vLLM's own
    *("bad_words", "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
)
"""What `SamplingParams` validates; `logprobs` comes from each url's own fields."""

_NOT_SUPPORTED: Final = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "suffix", "stream_options"),
        *("audio", "modalities", "prediction", "verbosity", "web_search_options"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    }
)
"""OpenAI's fields that would do nothing here; null asks for nothing."""


@dataclass(frozen=True)
class OpenAIForm:
    """What a row's output repeats of its body. `model`: None where it names none."""

    is_chat: bool
    model: str | None


@dataclass(frozen=True)
class OpenAIRequest:
    """A line read. `source`: the fields of `Row` that hold the prompt."""

    form: OpenAIForm
    source: Mapping[str, Any]
    params: SamplingParams


class _Line(BaseModel):
    """The fields around a body; `custom_id` was looked at when the line was parsed."""

    model_config = ConfigDict(frozen=True, strict=True)

    custom_id: Any
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class _TextFormat(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    type: Literal["text"]


class _Body(BaseModel):
    """What both urls take besides `_SAMPLED`. Null means not given; `user` to `service_tier` have no effect."""

    model_config = ConfigDict(frozen=True, strict=True)

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
    def _top_of_logprobs(self) -> "_ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def source(self) -> dict[str, Any]:
        variables = {
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning_effort,
        }
        return {"messages": self.messages, **variables}

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class _CompletionBody(_Body):
    prompt: Any
    logprobs: Any = None
    echo: Literal[False] | None = None
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: object) -> object:
        one = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
        if isinstance(one, str) or (isinstance(one, list) and all(type(part) is int for part in one)):
            return one
        raise ValueError("must be one text or one list of token ids (give each of several prompts a row of its own)")

    @property
    def source(self) -> dict[str, Any]:
        return {"prompt" if isinstance(self.prompt, str) else "prompt_token_ids": self.prompt}

    @property
    def num_logprobs(self) -> Any:
        return self.logprobs


def read_request(record: Mapping[str, Any], max_new_tokens: int | None) -> OpenAIRequest:
    """What a line with a `custom_id` asks for; ``max_new_tokens`` where it does not say itself.

    Raises:
        ConfigError, ValidationError: names the field that cannot be used.
    """
    if record.get("id") is not None:
        raise ConfigError("the row has both 'id' and 'custom_id'; give 'custom_id' alone")
    _refuse_unknown({name: value for name, value in record.items() if name != "id"}, _Line.model_fields)
    line = _Line.model_validate(record)
    is_chat = line.url == _CHAT
    kind = _ChatBody if is_chat else _CompletionBody
    _refuse_unknown(line.body, {**kind.model_fields, **dict.fromkeys(_SAMPLED)})
    body = kind.model_validate(line.body)
    sampled: dict[str, Any] = {name: line.body[name] for name in _SAMPLED if name in line.body}
    sampled |= {"seed": _unsigned(sampled.get("seed")), "logprobs": body.num_logprobs}
    defaults = {"max_new_tokens": max_new_tokens, "temperature": 1.0}
    params = SamplingParams.from_mapping(sampled, defaults=defaults, spellings=_SPELLINGS)
    if isinstance(body, _CompletionBody) and body.best_of not in (None, params.n):
        raise ConfigError(f"best_of must be equal to n, which is {params.n}, not {body.best_of}")
    return OpenAIRequest(OpenAIForm(is_chat, body.model), body.source, params)


def _refuse_unknown(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the first field that is not known, or that asks for what is not supported."""
    for name, value in given.items():
        if name in _NOT_SUPPORTED:
            if value is not None:
                raise ConfigError(f"{name} is not supported; leave it out")
        elif name not in known:
            raise ConfigError(f"unknown field {name!r}{nearest_field(name, list(known))}")


def _unsigned(seed: object) -> object:
    """A seed below 0, which OpenAI allows, as the same 64 bits without a sign; anything else as it is."""
    return seed + 2**64 if type(seed) is int and -(2**63) <= seed < 0 else seed
