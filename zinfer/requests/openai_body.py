"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`, in a batch file and over HTTP.

Fields of other interfaces that would change the answer are refused; those of `SamplingParams`, vLLM's extensions among
them, are accepted. Null means not given. Hints and unknown fields have no effect, unless one must be a misspelling. The
default temperature is 1 as at OpenAI.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, field_validator, model_validator

from zinfer.errors import ConfigError
from zinfer.requests.client_names import ClientNames, invalid_body, without_unknown
from zinfer.requests.field_errors import MESSAGES
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.requests.sampling_params import FIELDS, SamplingParams
from zinfer.requests.structured_outputs import structure_of_response_format
from zinfer.requests.tools import ToolUse, read_tools

_MOST_NEW: Final = ("max_tokens", "max_completion_tokens")
_NAMES: Final = {
    **{name: name for name in FIELDS if name not in ("max_new_tokens", "min_new_tokens", "detokenize")},
    **dict.fromkeys(_MOST_NEW, "max_new_tokens"),
    "min_tokens": "min_new_tokens",
}
"""Body fields that `SamplingParams` validates, including vLLM's extensions; each url reads `logprobs` itself."""

_NOT_SUPPORTED: Final = frozenset(
    {
        # Chats may have tools.
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "suffix"),
        *("audio", "web_search_options", "truncate_prompt_tokens", "return_token_ids"),
        *("spaces_between_special_tokens", "detokenize", "chat_template"),
        *("documents", "use_beam_search", "length_penalty", "system", "input", "instructions"),
    }
)
"""Fields of OpenAI's, vLLM's and Anthropic's interfaces that change the answer: refused unless null."""
_TOKEN_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT: Final = {"anyOf": [{"type": "string"}, _TOKEN_IDS]}
PROMPTS: Final[dict[str, Any]] = {"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT, "minItems": 1}]}
"""JSON schema of a text, token ids, or a list of them."""
_MESSAGE: Final = {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]}
_MESSAGES: Final[dict[str, Any]] = {"type": "array", "items": _MESSAGE, "minItems": 1}


class StreamOptions(BaseModel):
    """What a stream holds besides the choices. `include_usage`: a last chunk with the counts of tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(BaseModel):
    """Fields of both urls, besides those that `SamplingParams` validates.

    What is Any and has no property has no effect, nor has `stream_options.include_obfuscation`: OpenAI's hints about
    caches, billing, moderation and style. `priority` is vLLM's: of the requests that wait at a server, those of a lower
    number start first.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    safety_identifier: Any = None
    verbosity: Any = None
    prediction: Any = None
    moderation: Any = None
    modalities: Any = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None

    @field_validator("modalities")
    @classmethod
    def _check_modalities(cls, value: object) -> object:
        if value in (None, ["text"]):
            return value
        raise ValueError("only text can be generated; give ['text'], or leave it out")

    @model_validator(mode="after")
    def _check_stream(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def names(self) -> ClientNames:
        """The names that errors must have."""
        given = self.model_extra or {}
        most_new = next((name for name in _MOST_NEW if given.get(name) is not None), _MOST_NEW[0])
        by_own = {"max_new_tokens": most_new, "min_new_tokens": "min_tokens"}
        if self.response_format is not None and given.get("structured_outputs") is None:
            by_own["structured_outputs"] = "response_format"
        return ClientNames(_fields_of(type(self)), by_own=by_own)

    @property
    def num_logprobs(self) -> Any:
        """`SamplingParams.logprobs`, not validated."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> Any:
        """`SamplingParams.prompt_logprobs` unless it is given, not validated."""
        return None

    def params(self, max_new_tokens: int | None) -> SamplingParams:
        """Return the sampling parameters; ``max_new_tokens`` is the default.

        Raises:
            ConfigError: names the field that is unknown, not supported or invalid.
        """
        sampled = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name in sampled:
            if name in _NOT_SUPPORTED:
                raise ConfigError(f"{name} is not supported; leave it out")
        fields = list(type(self).model_fields)
        known = frozenset((*fields, *_NAMES)) | (_of_both() - _fields_of(type(self)))
        sampled = without_unknown(sampled, known)
        sampled["logprobs"] = self.num_logprobs
        if sampled.get("prompt_logprobs") is None:
            sampled["prompt_logprobs"] = self.num_prompt_logprobs
        elif self.stream:
            raise ConfigError("prompt_logprobs are not in the chunks of a stream; leave stream out, or use echo")
        if (structure := structure_of_response_format(self.response_format)) is not None:
            if sampled.get("structured_outputs") is not None:
                raise ConfigError(
                    "response_format and structured_outputs both say what the output is; give one of them"
                )
            sampled["structured_outputs"] = structure
        defaults = {"max_new_tokens": max_new_tokens, "temperature": 1.0}
        params = SamplingParams.from_mapping(sampled, defaults=defaults, beside=fields, names=_NAMES)
        if sampled.get("temperature") is not None:
            return params
        return replace(params, stated=params.stated - {"temperature"})  # the model's generation config comes first


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Any], WithJsonSchema(_MESSAGES), Field(description=MESSAGES)]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20, description="a whole number from 0 to 20")] = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def names(self) -> ClientNames:
        names = super().names
        is_structured = (self.model_extra or {}).get("structured_outputs") is not None
        is_forced = self.tool_choice not in (None, "none", "auto") and not is_structured
        by_own = {**names.by_own, "structured_outputs": "tools"} if is_forced else names.by_own
        return replace(names, prompt="messages", by_own=by_own)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools; None if there are none that may be used. Raises ConfigError as `read_tools`."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def keeps_special(self) -> bool:
        """Whether special tokens are content."""
        return (self.model_extra or {}).get("skip_special_tokens") is False

    def params(self, max_new_tokens: int | None) -> SamplingParams:
        params, use = super().params(max_new_tokens), self.tool_use
        if use is None:
            return params
        if (structure := use.structure) is not None:
            if params.structured_outputs is not None:
                raise ConfigError("tool_choice asks for calls, and another field for an output of another form")
            return replace(params, structured_outputs=structure)
        return replace(params, skip_special_tokens=False)  # calls may stand between special tokens


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(PROMPTS)]
    logprobs: Any = None
    echo: bool | None = None
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
        if not all(_is_prompt(each) for each in several):
            raise ValueError("must be a text, a list of token ids, or a list of such prompts")
        return value

    @property
    def prompts(self) -> list[PromptLike]:
        """Each prompt: a text or its token ids."""
        given = self.prompt
        several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in several]

    @property
    def names(self) -> ClientNames:
        names = super().names
        if (self.model_extra or {}).get("prompt_logprobs") is not None:
            return names
        return replace(names, by_own={**names.by_own, "prompt_logprobs": "echo"})  # which asks for them

    @property
    def num_logprobs(self) -> Any:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> Any:
        if not self.echo:
            return None
        given = self.model_extra or {}
        is_echo_alone = self.logprobs is None and 0 in (given.get(name) for name in _MOST_NEW)
        return 0 if is_echo_alone else self.logprobs

    def params(self, max_new_tokens: int | None) -> SamplingParams:
        params = super().params(max_new_tokens)
        if self.best_of not in (None, params.n):
            raise ConfigError(f"best_of must be equal to n, which is {params.n}, not {self.best_of}")
        return params


_AnyBody = TypeVar("_AnyBody", bound=Body)


def read_body(kind: type[_AnyBody], fields: Mapping[str, Any]) -> _AnyBody:
    """Validate a body. Raises FieldError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error, kind) from None


@cache  # rows of a batch share it
def _fields_of(kind: type[Body]) -> frozenset[str]:
    return frozenset((*kind.model_fields, *_NAMES, *_NOT_SUPPORTED))


@cache
def _of_both() -> frozenset[str]:
    return _fields_of(ChatBody) | _fields_of(CompletionBody)


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value))
