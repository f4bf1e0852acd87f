"""Makes requests, which a batcher can run, of prompts and their sampling params."""

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from zinfer.errors import ConfigError
from zinfer.requests.completion import Completion, choose_seed
from zinfer.requests.detokenizer import Detokenizer
from zinfer.requests.generation_config import NO_RULES, GenerationDefaults, TokenRules
from zinfer.requests.grammar import Grammar, GrammarCompiler
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_encoder import PromptEncoder, PromptLike, as_list, is_chat, template_variables
from zinfer.requests.prompt_end import NO_PROMPT, PromptEnd, find_prompt_end
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.stop_criteria import StopCriteria
from zinfer.scheduling.precedence import FIRST_COME, Precedence

_PROMPTS_AT_ONCE: Final = 1024
"""Prompts encoded together: a tokenizer needs over ten times the memory of their tokens while it runs."""


class SentRequest(NamedTuple):
    """What other ranks need of a request: the fields of `Request`, and whether it has a detokenizer."""

    prompt_index: int
    sample_index: int
    prompt_ids: "array[int]"
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...]
    has_detokenizer: bool
    precedence: Precedence
    known_ids: "array[int] | None"

    @property
    def call(self) -> "SentRequest":
        """What the same request of another rank has in common with it: all but a seed that each rank draws."""
        return self if self.params.seed is not None else self._replace(seed=0)


@dataclass(eq=False)
class Request:
    """One of the ``n`` completions of one prompt.

    Attributes:
        prompt_index: which of its call's prompts, from 0.
        sample_index: which of that prompt's completions, from 0.
        prompt_ids: the prompt's tokens, at least one.
        params: sampling params; a batcher ignores `n`, `stop` and `bad_words`.
        seed: of its draws.
        stop_criteria: decide when it is complete.
        end_token_ids: not drawn before ``min_new_tokens`` are generated.
        bad_word_ids: tokens of each of its bad words.
        grammar: of its output; None if it has none.
        detokenizer: decodes its tokens one by one; None if only the completion is wanted.
        precedence: whether it starts before others.
        known_ids: its tokens, if an earlier process has completed it: none is drawn; see [Note: known tokens] in
            `known_tokens`.
        rules: of the model, for its tokens.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: "array[int]"
    params: SamplingParams
    seed: int
    stop_criteria: StopCriteria
    end_token_ids: frozenset[int]
    bad_word_ids: Sequence[tuple[int, ...]]
    grammar: Grammar | None = None
    detokenizer: Detokenizer | None = None
    precedence: Precedence = FIRST_COME
    known_ids: "array[int] | None" = None
    rules: TokenRules = NO_RULES

    @property
    def sent(self) -> SentRequest:
        """The request without its state, to be sent to other ranks."""
        place = self.prompt_index, self.sample_index, self.prompt_ids, self.params, self.seed
        words, is_told = tuple(map(tuple, self.bad_word_ids)), self.detokenizer is not None
        return SentRequest(*place, self.end_token_ids, words, is_told, self.precedence, self.known_ids)


class RequestBuilder:
    """Makes requests of prompts; thread-safe.

    Args:
        tokenizer: None: prompts must be token ids.
        vocab_size: of the model.
        limits: of prompts and new tokens.
        end_token_ids: the model's.
        defaults: of its generation config.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        limits: LengthLimits,
        end_token_ids: frozenset[int],
        defaults: GenerationDefaults,
    ) -> None:
        self._tokenizer, self._defaults = tokenizer, defaults
        self._end_token_ids, self._vocab_size = end_token_ids, vocab_size
        self._encoder = PromptEncoder(tokenizer, vocab_size, limits, clips=True)
        self._lock = threading.Lock()  # tokenizers are not thread-safe
        self._compiler = GrammarCompiler(tokenizer, vocab_size, end_token_ids, self._lock)

    def build(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        reasoning_effort: str | None,
        fields: Mapping[str, Any],
        *,
        deltas: bool = False,
        precedence: Precedence = FIRST_COME,
        known: Mapping[int, Sequence[Sequence[int]]] = MappingProxyType({}),
    ) -> tuple[list[Request], list[Completion]]:
        """Return the requests of a call, and a completion with an error for each prompt that cannot be used.

        Args:
            deltas: whether each request gets a detokenizer.
            precedence: of all requests.
            known: by number of a prompt, the tokens of each of its completions.

        Raises:
            ConfigError: as `LLM.generate`; or known tokens cannot be those of a prompt.
        """
        pairs = _paired(prompts, params, fields)
        variables = template_variables(chat_template_kwargs, reasoning_effort)
        if variables and not any(is_chat(prompt) for prompt, _ in pairs):
            raise ConfigError(
                f"{next(iter(variables))!r} is for chat templates, but no prompt is the messages of a chat"
            )
        requests: list[Request] = []
        refused: list[Completion] = []
        for begin in range(0, len(pairs), _PROMPTS_AT_ONCE):
            several = pairs[begin : begin + _PROMPTS_AT_ONCE]
            with self._lock:
                encoded = self._encoder.encode_texts(several)
            for index, (prompt, (_, own)) in enumerate(zip(encoded, several, strict=True), begin):
                try:
                    grammar = self._grammar(own)  # before the lock: it may take seconds
                    with self._lock:
                        requests += self._samples(index, prompt, own, variables, grammar, deltas, precedence)
                except ConfigError as error:
                    refused += [Completion.failed(index, sample, str(error)) for sample in range(own.n)]
        for request in requests:
            if (outputs := known.get(request.prompt_index)) is not None:
                self._check_known(request, outputs)
                request.known_ids = array("i", outputs[request.sample_index])
        return requests, refused

    def receive(self, sent: SentRequest) -> Request:
        """Make the request that another rank sent."""
        prompt_end = self._prompt_end(sent.prompt_ids, sent.params)
        return Request(
            sent.prompt_index,
            sent.sample_index,
            sent.prompt_ids,
            sent.params,
            sent.seed,
            StopCriteria(self._tokenizer, sent.params, sent.end_token_ids, prompt_end),
            sent.end_token_ids,
            sent.bad_word_ids,
            self._grammar(sent.params, is_checked=True),
            self._detokenizer(sent.params, prompt_end, sent.has_detokenizer),
            sent.precedence,
            sent.known_ids,
            self._defaults.rules,
        )

    def close(self) -> None:
        """End the processes that render chats and compile grammars, if there are any."""
        self._compiler.close()
        with self._lock:
            self._encoder.close()

    def _check_known(self, request: Request, several: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError unless there are tokens of the model for each completion of a request's prompt."""
        number, n = request.prompt_index, request.params.n
        if len(several) != n:
            raise ConfigError(f"known[{number}] has {len(several)} completions, and the prompt gets {n}; give as many")
        if any(not 0 <= token_id < self._vocab_size for ids in several for token_id in ids):
            raise ConfigError(
                f"known[{number}] has a token that the model has not; ids go from 0 to {self._vocab_size - 1}"
            )

    def _samples(
        self,
        index: int,
        prompt: PromptLike,
        params: SamplingParams,
        variables: Mapping[str, Any],
        grammar: Grammar | None,
        deltas: bool,
        precedence: Precedence,
    ) -> list[Request]:
        token_ids, params = self._encoder.encode(prompt, self._defaults.fill(params), variables)
        prompt_ids = array("i", token_ids)
        ends = frozenset() if params.ignore_eos else self._end_token_ids
        bad_word_ids = self._encoder.bad_word_ids(params)
        prompt_end = self._prompt_end(prompt_ids, params)
        return [
            Request(
                index,
                sample,
                prompt_ids,
                params,
                0 if params.is_greedy else choose_seed(params.seed, prompt_ids, sample),
                StopCriteria(self._tokenizer, params, ends, prompt_end),
                ends,
                bad_word_ids,
                grammar,
                self._detokenizer(params, prompt_end, deltas),
                precedence,
                rules=self._defaults.rules,
            )
            for sample in range(params.n)
        ]

    def _grammar(self, params: SamplingParams, *, is_checked: bool = False) -> Grammar | None:
        form = params.structured_outputs
        return None if form is None else self._compiler.compile(form, is_checked=is_checked)

    def _prompt_end(self, prompt_ids: Sequence[int], params: SamplingParams) -> PromptEnd:
        if not params.detokenize:
            return NO_PROMPT
        is_formed = params.structured_outputs is not None
        return find_prompt_end(
            self._tokenizer, prompt_ids, skips_special=params.skip_special_tokens, is_formed=is_formed
        )

    def _detokenizer(self, params: SamplingParams, prompt_end: PromptEnd, is_wanted: bool) -> Detokenizer | None:
        if not is_wanted:
            return None
        skips_special, tokenizer = params.skip_special_tokens, self._tokenizer if params.detokenize else None
        return Detokenizer(tokenizer, params.stop, skips_special=skips_special, prompt_end=prompt_end)


def _paired(
    prompts: PromptLike | Iterable[PromptLike],
    params: SamplingParams | Sequence[SamplingParams] | None,
    fields: Mapping[str, Any],
) -> list[tuple[PromptLike, SamplingParams]]:
    """Return each prompt with its params, by default greedy ones with these fields.

    Raises:
        ConfigError: the numbers of params and prompts differ, a param is not `SamplingParams`, a field cannot be used,
            or fields are given beside params.
    """
    if fields:
        if params is not None:
            raise ConfigError(f"{next(iter(fields))} is given beside params; give it in them")
        params = SamplingParams.from_mapping(fields)
    several = as_list(prompts)
    each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(several):
        raise ConfigError(f"{len(each)} params for {len(several)} prompts; give one, or as many as prompts")
    for own in each:
        if not isinstance(own, SamplingParams):
            raise ConfigError(f"params are SamplingParams, not a {type(own).__name__}; write SamplingParams(...)")
    return list(zip(several, each, strict=True))
