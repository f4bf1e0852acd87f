"""Sampling parameters of a request, validated once. Uses no tensors and no tokenizer.

Names, meanings and ranges follow vLLM's SamplingParams and transformers' generation settings. Only the default differs:
it is greedy, so that a prompt means the same for every model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property, wraps
from operator import attrgetter, index
from typing import Annotated, Any, Final, SupportsIndex

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from zinfer.errors import ConfigError
from zinfer.requests.client_names import FieldError
from zinfer.requests.field_errors import TOKEN_IDS, field_error, short, unknown_field
from zinfer.requests.length_limits import DEFAULT_NEW_TOKENS
from zinfer.requests.structured_outputs import StructuredOutputsParams, as_structure

OTHER_SPELLINGS: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""vLLM's names, which `from_mapping` accepts too."""

LEAST_SEED: Final = -(2**63)
MAX_SEED: Final = 2**64 - 1  # every draw hashes eight bytes of it
MAX_N: Final = 1024  # each is a separate sequence
_MOST_DIGITS: Final = 18  # of a token id: int() refuses strings of thousands
MIN_PENALTY: Final = 1e-3
MAX_PENALTY: Final = 1e3
"""Of repetition: beyond these, logits may overflow in half precision."""
MAX_BIAS: Final = 100.0  # the range of OpenAI's and vLLM's interfaces; it forbids or forces any token of a sane model


def as_tuple(value: object) -> object:
    """Convert a list to a tuple, for strict fields."""
    return tuple(value) if isinstance(value, list) else value


def _as_texts(value: object) -> object:
    return (value,) if isinstance(value, str) else as_tuple(value)


def as_whole(value: object) -> object:
    """Convert a whole number of another type, such as numpy's or 8.0, to int, for strict fields."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex | float):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return index(value)


_Natural = Annotated[int, Field(ge=0), BeforeValidator(as_whole)]
_Penalty = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")]
_Switch = Annotated[bool, Field(description="true or false")]
_Choice = Annotated[bool | None, Field(description="true or false")]
_TokenIds = Annotated[tuple[_Natural, ...], BeforeValidator(as_tuple)]
_Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_as_texts),
    Field(description="a text or a list of texts, none of them empty"),
]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class SamplingParams:
    """Sampling parameters of one request. Lists and single stop strings are accepted; invalid values raise ConfigError.

    vLLM's names ``max_tokens`` and ``min_tokens`` are accepted too, and can be read.

    max_new_tokens: 0: only with prompt_logprobs; None: 128, or fewer if the model's context leaves less.
    min_new_tokens: minimum number of tokens before the output can end.
    temperature: 0 is greedy. top_k (0 and -1: off), top_p (1: off), min_p (0: off): filters of the candidates.
    repetition_penalty: for tokens in prompt and output (1: off); presence_penalty, frequency_penalty: in the output.
    logit_bias: added to logits, by token id. allowed_token_ids: the only tokens that may be sampled; None: all.
    bad_words: texts that the output must not contain: the last token of one never follows the others.
    structured_outputs: what the output must be, such as JSON of a schema; it ends there, even before min_new_tokens.
    stop: texts; stop_token_ids: tokens besides the model's end tokens. ignore_eos: the model's end tokens do not stop.
    include_stop_str_in_output: keep the stop string or token in the text. skip_special_tokens: omit special tokens.
    detokenize: false: outputs are tokens without text, and have no stop strings.
    n: number of outputs. logprobs: number of alternatives returned for each token; 0: only the chosen token's
    log-probability; None: nothing. prompt_logprobs: the same for the prompt's tokens from position
    prompt_logprobs_start on, at the earliest the second one (1).
    add_special_tokens: whether the tokenizer adds special tokens to the prompt; None: to a text, but for a second
    beginning-of-text token, and not to a chat, whose template writes them.
    add_generation_prompt: whether a chat gets the beginning of the assistant's next message; continue_final_message:
    whether its last message is continued. None: a last message of the assistant is continued, and others are answered.
    stated: the fields that were given, which the model's generation config does not replace; not given by callers.
    seed: seed of this request's random stream; a negative one is the same as that plus 2**64. None: a random one, which
    the completion states; a job derives it from the row's id, so that a resumed job writes the same rows.
    """

    max_new_tokens: Annotated[
        int | None, Field(ge=0, description="a whole number of at least 1"), BeforeValidator(as_whole)
    ] = None
    min_new_tokens: Annotated[
        int, Field(ge=0, description="a whole number of at least 0"), BeforeValidator(as_whole)
    ] = 0
    temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="a finite number of at least 0 (0: greedy)")
    ] = 0.0
    top_k: Annotated[
        int, Field(ge=-1, description="a whole number of at least -1 (0 and -1: off)"), BeforeValidator(as_whole)
    ] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="a number above 0, up to 1 (1: off)")] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")] = 0.0
    repetition_penalty: Annotated[
        float, Field(ge=MIN_PENALTY, le=MAX_PENALTY, description="a number from 0.001 to 1000 (1: off)")
    ] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: Annotated[
        dict[_Natural, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None,
        Field(description="an object of token ids, whole numbers of at least 0, and biases from -100 to 100"),
    ] = field(default=None, hash=False)
    allowed_token_ids: Annotated[_TokenIds | None, Field(min_length=1, description=f"{TOKEN_IDS}, one at least")] = None
    bad_words: _Texts = ()
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        BeforeValidator(as_structure),
        Field(description="StructuredOutputsParams, or an object with one of their fields"),
    ] = None
    stop: _Texts = ()
    stop_token_ids: Annotated[_TokenIds, Field(description=TOKEN_IDS)] = ()
    ignore_eos: _Switch = False
    include_stop_str_in_output: _Switch = False
    skip_special_tokens: _Switch = True
    detokenize: _Switch = True
    n: Annotated[
        int, Field(ge=1, le=MAX_N, description=f"a whole number from 1 to {MAX_N}"), BeforeValidator(as_whole)
    ] = 1
    logprobs: Annotated[
        int | None, Field(ge=0, description="a whole number of at least 0"), BeforeValidator(as_whole)
    ] = None
    prompt_logprobs: Annotated[
        int | None, Field(ge=0, description="a whole number of at least 0"), BeforeValidator(as_whole)
    ] = None
    prompt_logprobs_start: Annotated[
        int, Field(ge=1, description="a whole number of at least 1"), BeforeValidator(as_whole)
    ] = 1
    seed: Annotated[
        int | None,
        Field(ge=LEAST_SEED, le=MAX_SEED, description="a whole number from -2**63 to 2**64 - 1"),
        BeforeValidator(as_whole),
    ] = None
    add_special_tokens: _Choice = None
    add_generation_prompt: _Choice = None
    continue_final_message: _Choice = None
    stated: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    @model_validator(mode="after")
    def _check_together(self) -> "SamplingParams":
        if self.max_new_tokens == 0 and self.prompt_logprobs is None:
            remedy = "0 needs prompt_logprobs"
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, not 0; {remedy}")
        if self.min_new_tokens > self.most_new_tokens:
            most = f"at most max_new_tokens, which is {self.most_new_tokens}"
            raise ValueError(f"min_new_tokens must be {most}, not {self.min_new_tokens}")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message and add_generation_prompt are both true, and a chat's last message is either "
                "continued or answered; give one of them"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop is for texts, and detokenize is false, which leaves outputs without text; give stop_token_ids "
                "instead, or leave detokenize out"
            )
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n must be 1 if temperature is 0, since greedy outputs are all the same, not {self.n}")
        return self

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        beside: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
    ) -> "SamplingParams":
        """Return the parameters in a JSON row, where null means not given and keys of `logit_bias` are strings.

        Args:
            defaults: defaults by field.
            beside: other fields of such rows, listed in the message for an unknown field.
            names: fields by their names in such rows; None: the fields' own names and vLLM's.

        Raises:
            ConfigError: a field is unknown or invalid, or two names of one field have different values.
        """
        names = names or _NAMES
        for name in mapping:
            if name not in names:
                raise FieldError(unknown_field(name, [*beside, *names]), name)
        given = _by_field({name: value for name, value in mapping.items() if value is not None}, names)
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = _with_number_keys(given["logit_bias"])
        return cls(**{**(defaults or {}), **given})

    @property
    def most_new_tokens(self) -> int:
        """`max_new_tokens`, or its default if None."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def within(self, num_left: int | None) -> "SamplingParams":
        """Return a copy with `max_new_tokens` set: the default, limited to ``num_left`` (None: no limit).

        If ``num_left`` is less than ``min_new_tokens`` or 1, the number stays too large.
        """
        if self.max_new_tokens is not None:
            return self
        most = self.most_new_tokens
        if num_left is not None and num_left >= max(self.min_new_tokens, 1):
            most = min(most, num_left)
        return replace(self, max_new_tokens=most)

    def clipped(self, num_left: int | None) -> "SamplingParams":
        """Return a copy whose numbers of new tokens, stated or not, are ``num_left`` at most (None: no limit).

        If ``num_left`` is less than 1, they stay too large.
        """
        if num_left is None or not 1 <= num_left < self.most_new_tokens:
            return self.within(num_left)
        return replace(self, max_new_tokens=num_left, min_new_tokens=min(self.min_new_tokens, num_left))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, so that filters and seed have no effect."""
        return self.temperature == 0

    @cached_property
    def is_plain(self) -> bool:
        """Whether decoding is greedy on unchanged logits, without logprobs."""
        return self.is_greedy and self.logprobs is None and not self.changes_logits and not self.min_new_tokens

    @cached_property
    def changes_logits(self) -> bool:
        """Whether biases, penalties or token bans apply to the logits."""
        is_limited = self.allowed_token_ids is not None or self.structured_outputs is not None
        return bool(self.logit_bias or self.bad_words) or is_limited or self.has_penalty

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError for a token id beyond `vocab_size`."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            beyond = [token_id for token_id in getattr(self, name) or () if token_id >= vocab_size]
            if beyond:
                allowed = f"made of token ids below {vocab_size}, the model's vocabulary"
                raise ConfigError(f"{name} must be {allowed}, not {beyond[0]}")


def _init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` to accept vLLM's names, to note what is stated, and to raise ConfigError."""

    @wraps(init)
    def __init__(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        try:
            given = _by_field(kwargs, OTHER_SPELLINGS)
            given.setdefault("stated", frozenset((*given, *_ORDER[: len(args)])))
            init(self, *args, **given)
        except ValidationError as error:
            raise ConfigError(field_error(error, SamplingParams)) from None

    return __init__


def _by_field(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values by field. Raises ConfigError if two names of a field have different values."""
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in given.items():
        field = names.get(name, name)
        if field in found and found[field] != value:
            values = f"{short(found[field])} and {short(value)}"
            raise ConfigError(f"{spelled[field]} and {name} mean the same, but are {values}; give one of them")
        found[field], spelled[field] = value, name
    return found


# Not fields, since `dataclasses.replace` would pass both names.
SamplingParams.__init__ = _init(SamplingParams.__init__)  # type: ignore[method-assign]
for _other, _own in OTHER_SPELLINGS.items():
    setattr(SamplingParams, _other, property(attrgetter(_own)))

_ORDER: Final = tuple(each.name for each in fields(SamplingParams))
FIELDS: Final = tuple(name for name in _ORDER if name != "stated")
_NAMES: Final = {**{name: name for name in FIELDS}, **OTHER_SPELLINGS}


def _with_number_keys(biases: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert JSON's string keys to numbers. Raises ConfigError if two of them are the same token."""
    numbered = {
        int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= _MOST_DIGITS else key: bias
        for key, bias in biases.items()
    }
    if len(numbered) != len(biases):
        raise ConfigError("logit_bias names a token twice; give each token id once")
    return numbered
