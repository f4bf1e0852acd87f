"""What a row may ask of its sampling, validated once; it knows no tensors and no tokenizer.

Names, meanings and ranges are those of vLLM's SamplingParams and, where both have one, of transformers' generation
settings. The one difference is the default: greedy, because a prompt then means the same for every model.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from operator import attrgetter
from typing import Any, Final

from zinfer.errors import ConfigError

OTHER_SPELLINGS: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""vLLM's names, which `from_mapping` takes too."""

DEFAULT_NEW_TOKENS: Final = 128
"""Where no number is named, unless the model's context leaves fewer."""
MAX_SEED: Final = 2**64 - 1  # eight bytes of every draw's hash
MAX_N: Final = 1024  # each is a text of its own
_MOST_DIGITS: Final = 18  # of a token id: int() refuses texts of thousands
MAX_BIAS: Final = 100.0  # the range of OpenAI's and vLLM's interfaces; it forbids or forces any token of a sane model
_MAX_FLOAT: Final = sys.float_info.max


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`, both included; `text` says so in words."""

    text: str
    low: float
    high: float = _MAX_FLOAT
    is_whole: bool = False

    def holds(self, value: object) -> bool:
        """False for what is no number, true and false among them, and for NaN."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high and not (self.is_whole and isinstance(value, float))


_POSITIVE: Final = sys.float_info.min
_SHARE: Final = _Range("a number from 0 to 1", 0.0, 1.0)
_PENALTY: Final = _Range("a number from -2 to 2", -2.0, 2.0)
_NATURAL: Final = _Range("a whole number of at least 0", 0, is_whole=True)
_COUNT: Final = _Range("a whole number of at least 1", 1, is_whole=True)
_RANGES: Final = {
    "max_new_tokens": _COUNT,
    "min_new_tokens": _NATURAL,
    "temperature": _Range("a finite number of at least 0 (0: greedy)", 0.0),
    "top_k": _Range("a whole number of at least -1 (0 and -1: off)", -1, is_whole=True),
    "top_p": _Range("a number above 0, up to 1 (1: off)", _POSITIVE, 1.0),
    "min_p": _SHARE,
    "repetition_penalty": _Range("a finite number above 0 (1: off)", _POSITIVE),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "n": _Range(f"a whole number from 1 to {MAX_N}", 1, MAX_N, is_whole=True),
    "logprobs": _NATURAL,
    "seed": _Range("a whole number from 0 to 2**64 - 1", 0, MAX_SEED, is_whole=True),
}
_MAY_BE_NONE: Final = frozenset({"max_new_tokens", "logprobs", "seed"})
_BIAS: Final = _Range("a number from -100 to 100", -MAX_BIAS, MAX_BIAS)


@dataclass(frozen=True)
class SamplingParams:
    """One row's settings. Lists are taken for tuples, one string for one stop; every mistake is a ConfigError.

    vLLM's names ``max_tokens`` and ``min_tokens`` are taken too, and can be read.

    max_new_tokens: None: 128, or what the model's context leaves, if that is less.
    min_new_tokens: before so many no token ends the row.
    temperature: 0 is greedy. top_k (0 and -1: off), top_p (1: off), min_p (0: off): filters of what is drawn from.
    repetition_penalty: of tokens in prompt and output (1: off); presence_penalty, frequency_penalty: of the output's.
    logit_bias: what is added to a token's logit, by token id. allowed_token_ids: no others come; None: all may.
    bad_words: texts that the output may not have: the last token of one does not come behind those before it.
    stop: texts; stop_token_ids: tokens besides the model's end tokens. ignore_eos: those do not end the row.
    include_stop_str_in_output: the text keeps what ended it. skip_special_tokens: the text is without special tokens.
    n: how many outputs the row has. logprobs: how many alternatives are told beside each chosen token; 0: the
    chosen one's log-probability alone; None: nothing. seed: of the row's own random stream; None: the caller's choice.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _MAY_BE_NONE) and not allowed.holds(value):
                raise _refusal(name, allowed.text, value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, "true or false", getattr(self, name))
        # Still under construction: what callers may write in several ways is kept in one.
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _refusal("allowed_token_ids", "a list of one token id at least", [])
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.min_new_tokens > self.most_new_tokens:
            most = f"at most max_new_tokens, which is {self.most_new_tokens}"
            raise _refusal("min_new_tokens", most, self.min_new_tokens)
        if self.n > 1 and self.is_greedy:
            raise _refusal("n", "1 where temperature is 0, since greedy outputs are all the same", self.n)

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        beside: Sequence[str] = (),
        spellings: Mapping[str, str] = OTHER_SPELLINGS,
    ) -> SamplingParams:
        """The settings of a row of JSON; null means not given.

        Takes numbers written as text for the token ids of `logit_bias`. Raises ConfigError
        for an unknown field, and for two spellings that say different things.

        Args:
            defaults: of what is not given, under its own name.
            beside: fields that such a row has besides these, to be named where one is unknown.
            spellings: other names of fields, each with the field's own.
        """
        known = [known.name for known in fields(cls)]
        given: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for name, value in mapping.items():
            own_name = spellings.get(name, name)
            if own_name not in known:
                raise ConfigError(f"unknown field {name!r}{nearest_field(name, [*beside, *known], spellings)}")
            if value is None:
                continue
            if own_name in given and given[own_name] != value:
                first = f"{spelled[own_name]} is {_short(given[own_name])} and {name} is {_short(value)}"
                raise ConfigError(f"{first}, but both mean {own_name}; give one of them")
            given[own_name], spelled[own_name] = value, name
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = _with_number_keys(given["logit_bias"])
        return cls(**{**(defaults or {}), **given})

    @property
    def most_new_tokens(self) -> int:
        """`max_new_tokens`, or the number that stands for None."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def within(self, num_left: int | None) -> SamplingParams:
        """The same with a number of new tokens: where none was named, what ``num_left`` has room for; None: no limit.

        Where that is less than ``min_new_tokens``, or nothing, the number stays too large.
        """
        if self.max_new_tokens is not None:
            return self
        most = self.most_new_tokens
        if num_left is not None and num_left >= max(self.min_new_tokens, 1):
            most = min(most, num_left)
        return replace(self, max_new_tokens=most)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that filters and seed have no say."""
        return self.temperature == 0

    @cached_property
    def is_plain(self) -> bool:
        """Whether the most likely token is always taken, of logits as they are, and nothing is told of them."""
        return self.is_greedy and self.logprobs is None and not self.changes_logits and not self.min_new_tokens

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits get biases or penalties, or some tokens may not come."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None or self.has_penalty

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError for a token id that a model of `vocab_size` tokens does not have."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            beyond = [token_id for token_id in getattr(self, name) or () if token_id >= vocab_size]
            if beyond:
                raise _refusal(name, f"made of token ids below {vocab_size}, the model's vocabulary", beyond[0])


def _take_other_spellings(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        for other, own in OTHER_SPELLINGS.items():
            if other in kwargs and own in kwargs and kwargs[other] != kwargs[own]:
                values = f"{other} is {_short(kwargs[other])} and {own} is {_short(kwargs[own])}"
                raise ConfigError(f"{values}, but both mean {own}; give one of them")
        init(self, *args, **{OTHER_SPELLINGS.get(name, name): value for name, value in kwargs.items()})

    return __init__


# Not fields: `dataclasses.replace` would give both spellings.
SamplingParams.__init__ = _take_other_spellings(SamplingParams.__init__)  # type: ignore[method-assign]
for _other, _own in OTHER_SPELLINGS.items():
    setattr(SamplingParams, _other, property(attrgetter(_own)))


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise _refusal(name, "a text or a list of texts, none of them empty", value)
    return tuple(texts)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(map(_NATURAL.holds, value)):
        raise _refusal(name, "a list of token ids, whole numbers of at least 0", value)
    return tuple(value)


def _biases(value: object) -> dict[int, float] | None:
    """A copy, so that the caller's mapping may change."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(map(_NATURAL.holds, value)):
        raise _refusal("logit_bias", "an object of token ids, whole numbers of at least 0, and their biases", value)
    for token_id, bias in value.items():
        if not _BIAS.holds(bias):
            raise _refusal(f"logit_bias of token {token_id}", _BIAS.text, bias)
    return dict(value)


def _with_number_keys(biases: Mapping[Any, Any]) -> dict[Any, Any]:
    """JSON's keys are texts. Raises ConfigError where two of them are the same token."""
    numbered = {
        int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= _MOST_DIGITS else key: bias
        for key, bias in biases.items()
    }
    if len(numbered) != len(biases):
        raise ConfigError("logit_bias names a token twice; give each token id once")
    return numbered


def _refusal(name: str, allowed: str, value: object) -> ConfigError:
    return ConfigError(f"{name} must be {allowed}, not {_short(value)}")


def nearest_field(name: str, known: Sequence[str], spellings: Iterable[str] = ()) -> str:
    """Ends the message on an unknown field: what it resembles, else all fields that are known."""
    near = difflib.get_close_matches(str(name), [*known, *spellings], n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known fields: {', '.join(known)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
