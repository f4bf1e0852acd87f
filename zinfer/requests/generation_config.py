"""A checkpoint's generation_config.json: defaults of sampling parameters, and rules for the tokens of each output.

One rule holds for continuous and padded batches, jobs and servers. Penalties, suppressed and forced tokens apply to
every request. temperature, top_p, top_k and min_p apply to requests that sample: `do_sample` decides nothing, because a
request without a temperature is greedy, or as OpenAI's interface says. What a request states comes first.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.bad_words import last_ids
from zinfer.requests.sampling_params import SamplingParams

_FILE: Final = "generation_config.json"
_OFF: Final = 'zinfer.generation_config "none" (--generation-config none) ignores it'
_OF_DRAWS: Final = ("temperature", "top_p", "top_k", "min_p")
_OF_ALL: Final = ("repetition_penalty", "min_new_tokens")
_OF_TOKENS: Final = {
    "suppress_tokens": "suppressed_ids",
    "begin_suppress_tokens": "first_suppressed_ids",
    "bad_words_ids": "bad_word_ids",
    "no_repeat_ngram_size": "ngram_size",
    "forced_bos_token_id": "forced_first_id",
    "forced_eos_token_id": "forced_last_id",
}
"""Fields of `TokenRules`, by the file's keys."""
_WITHOUT_EFFECT: Final = frozenset(
    {
        *(
            "eos_token_id",
            "pad_token_id",
            "bos_token_id",
            "decoder_start_token_id",
            "do_sample",
            "transformers_version",
        ),
        *("max_length", "max_new_tokens", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
        *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_logits", "output_scores"),
        *("disable_compile", "compile_config", "prefill_chunk_size", "low_memory", "continuous_batching_config"),
        *("early_stopping", "length_penalty", "remove_invalid_values", "renormalize_logits", "is_assistant"),
        *("trust_remote_code", "chat_format", "max_window_size", "_from_model_config", "use_mtp", "speculation_type"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    }
)
"""Keys that change no token here: ids that are read elsewhere, lengths that a request states, ways to compute."""
_NEUTRAL: Final[tuple[object, ...]] = (None, False, [], {})
_USUAL: Final = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1.0, "min_length": 0}


@dataclass(frozen=True)
class TokenRules:
    """Which tokens outputs may have, whatever their requests state.

    Attributes:
        suppressed_ids: never drawn; ``first_suppressed_ids`` not as the first token.
        bad_word_ids: tokens of each word that outputs must not contain.
        ngram_size: no sequence of so many tokens occurs twice; 0: no limit.
        forced_first_id: the first token, behind an encoder.
        forced_last_id: the last of `max_new_tokens` tokens.
        reads_prompt: whether prompt and output are one text; not behind an encoder.
    """

    suppressed_ids: tuple[int, ...] = ()
    first_suppressed_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    ngram_size: int = 0
    forced_first_id: int | None = None
    forced_last_id: int | None = None
    reads_prompt: bool = field(default=True, compare=False)

    def __bool__(self) -> bool:
        return self != NO_RULES

    def forced(self, num_tokens: int, max_new_tokens: int) -> int | None:
        """Return the token that must follow so many tokens of an output; None: any may."""
        if self.forced_last_id is not None and num_tokens == max_new_tokens - 1:
            return self.forced_last_id
        return self.forced_first_id if num_tokens == 0 else None

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> set[int]:
        """Return the tokens that must not follow an output."""
        found = {*self.suppressed_ids, *(() if output_ids else self.first_suppressed_ids)}
        if not self.bad_word_ids and not self.ngram_size:
            return found
        text = [*prompt_ids, *output_ids] if self.reads_prompt else list(output_ids)
        found.update(last_ids(self.bad_word_ids, text))
        if self.ngram_size:
            num_before = self.ngram_size - 1
            before = text[len(text) - num_before :]
            ends = range(num_before, len(text))
            found.update(text[end] for end in ends if text[end - num_before : end] == before)
        return found


NO_RULES: Final = TokenRules()


@dataclass(frozen=True)
class GenerationDefaults:
    """What a generation config changes.

    Attributes:
        values: defaults of `SamplingParams`, by field.
        rules: for tokens.
        ignored: keys that would change tokens and cannot be honoured, with their values.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    rules: TokenRules = NO_RULES
    ignored: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Any, choice: str = "auto") -> "GenerationDefaults":
        """Read a module's generation config; ``choice`` "none" or a module without one: nothing.

        Raises:
            ConfigError: a value cannot be used.
        """
        config = None if choice == "none" else getattr(module, "generation_config", None)
        if config is None:
            return cls()
        given = {
            name: value
            for name, value in config.to_diff_dict().items()
            if name not in _WITHOUT_EFFECT and value not in _NEUTRAL and value != _USUAL.get(name)
        }
        has_encoder = bool(getattr(module.config, "is_encoder_decoder", False))
        if not has_encoder:  # transformers forces it behind prompts of one token alone
            given.pop("forced_bos_token_id", None)
        usual, ends = SamplingParams(), _as_ids(config.eos_token_id)
        values = {name: given.pop(name) for name in (*_OF_DRAWS, *_OF_ALL) if name in given}
        values = {name: value for name, value in values.items() if name == "temperature" or value != vars(usual)[name]}
        if values.get("temperature") == 1:
            del values["temperature"]
        rules = {own: given.pop(name) for name, own in _OF_TOKENS.items() if name in given}
        try:
            SamplingParams(**{**values, "max_new_tokens": max(1, int(values.get("min_new_tokens", 1)))})
            return cls(values, _read_rules(rules, ends, reads_prompt=not has_encoder), given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{_FILE}: {error}; mend it, or leave it out: {_OFF}") from error

    @property
    def identity(self) -> dict[str, Any]:
        """What changes outputs, by the file's keys; empty if nothing does."""
        rules = {name: getattr(self.rules, own) for name, own in _OF_TOKENS.items()}
        unset = {name: getattr(NO_RULES, own) for name, own in _OF_TOKENS.items()}
        return {**self.values, **{name: value for name, value in rules.items() if value != unset[name]}}

    @property
    def of_all(self) -> dict[str, Any]:
        """Those of them that apply to every request, also if it does not sample."""
        return {name: value for name, value in self.identity.items() if name not in _OF_DRAWS}

    @property
    def notice(self) -> str:
        """A line on what applies and what cannot be honoured; empty if there is neither."""
        found = self.identity
        always = [_shown(*each) for each in self.of_all.items()]
        drawn = [_shown(name, found[name]) for name in _OF_DRAWS if name in found]
        parts = [", ".join(always)] if always else []
        parts += [f"where a request samples: {', '.join(drawn)}"] if drawn else []
        parts += [f"not supported: {', '.join(_shown(*each) for each in self.ignored.items())}"] if self.ignored else []
        return f"{_FILE}: {'; '.join(parts)}; {_OFF}" if parts else ""

    def fill(self, params: SamplingParams) -> SamplingParams:
        """Return the params with defaults for what they do not state.

        Raises:
            ConfigError: they cannot be used together.
        """
        names = (*_OF_ALL, *(() if params.is_greedy else _OF_DRAWS))
        values = {name: self.values[name] for name in names if name in self.values and name not in params.stated}
        if "min_new_tokens" in values:
            values["min_new_tokens"] = min(values["min_new_tokens"], params.most_new_tokens)
        return replace(params, **values) if values else params


NO_DEFAULTS: Final = GenerationDefaults()


def _read_rules(given: Mapping[str, Any], end_ids: Collection[int], *, reads_prompt: bool) -> TokenRules:
    """Return the rules of a config's values. Raises TypeError or ValueError."""
    words = tuple(tuple(map(int, word)) for word in given.get("bad_word_ids", ()))
    last = _as_ids(given.get("forced_last_id"))
    return TokenRules(
        tuple(map(int, given.get("suppressed_ids", ()))),
        tuple(map(int, given.get("first_suppressed_ids", ()))),
        tuple(word for word in words if word and not (len(word) == 1 and word[0] in end_ids)),
        int(given.get("ngram_size", 0)),
        None if "forced_first_id" not in given else int(given["forced_first_id"]),
        last[0] if last else None,
        reads_prompt,
    )


def _as_ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _shown(name: str, value: object) -> str:
    text = str(value) if not isinstance(value, list | tuple) else f"of {len(value)}"
    return f"{name} {text:.40}"
