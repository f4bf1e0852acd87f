"""Beam search: the most likely completions of prompts, found step by step by `LLM.generate`.

[Note: beams] A step generates one token after each live sequence of each prompt and takes the model's log-probabilities
of the most likely tokens there. The sequences of all prompts share passes, and the prefix cache has what earlier steps
computed of them but for the last page's tokens, so a step costs about one pass.

The search is that of transformers' `generate(num_beams=...)` with `early_stopping` false. Of all candidates of a step,
those among the best ``beam_width`` that end are finished; the best ``beam_width`` that do not end go on. That many are
always found if there is one more candidate for each end token. The search is over when no live sequence would be better
than the worst finished one if it ended now.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from heapq import nlargest
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from zinfer.errors import ConfigError
from zinfer.requests.completion import Completion
from zinfer.requests.field_errors import field_error
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_end import decode
from zinfer.requests.sampling_params import MAX_N, SamplingParams, as_whole


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class BeamSearchParams:
    """Parameters of a beam search, named as vLLM's. Invalid values raise ConfigError.

    beam_width: sequences that are kept at each step, and returned for each prompt.
    max_tokens: maximum new tokens of a sequence; fewer if the model's context leaves less.
    ignore_eos: the model's end tokens do not end a sequence.
    temperature: as in vLLM without effect: nothing is drawn, and sequences compete by the model's own probabilities.
    length_penalty: a sequence's score is its log-probability divided by its number of new tokens to this power, so
        that a positive one favors long sequences.
    include_stop_str_in_output: keep the end token in the text.
    """

    beam_width: Annotated[
        int, Field(ge=1, le=MAX_N, description=f"a whole number from 1 to {MAX_N}"), BeforeValidator(as_whole)
    ]
    max_tokens: Annotated[int, Field(ge=1, description="a whole number of at least 1"), BeforeValidator(as_whole)]
    ignore_eos: Annotated[bool, Field(description="true or false")] = False
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False, description="a finite number of at least 0")] = 0.0
    length_penalty: Annotated[float, Field(ge=-10, le=10, description="a number from -10 to 10")] = 1.0
    include_stop_str_in_output: Annotated[bool, Field(description="true or false")] = False


def _init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` to raise ConfigError."""

    @wraps(init)
    def __init__(self: BeamSearchParams, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError(field_error(error, BeamSearchParams)) from None

    return __init__


BeamSearchParams.__init__ = _init(BeamSearchParams.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence that a beam search found.

    Attributes:
        tokens: of the prompt and of its completion, an end token too.
        text: of all tokens, special ones too, but for the end token; empty without a tokenizer.
        cum_logprob: the log-probability of the completion, the sum of its tokens'.
        finish_reason: "stop" (an end token) or "length".
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences of one prompt, the best first.

    Attributes:
        sequences: ``beam_width`` of them, or as many as there are; none if there was an error.
        error: why the prompt could not be completed; None if it was.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass(frozen=True)
class _Beam:
    """A live or finished completion, without its prompt."""

    token_ids: tuple[int, ...] = ()
    cum_logprob: float = 0.0
    score: float = 0.0

    def followed(self, token_id: int, cum_logprob: float, length_penalty: float) -> "_Beam":
        ids = (*self.token_ids, token_id)
        return _Beam(ids, cum_logprob, cum_logprob / len(ids) ** length_penalty)


@dataclass
class _Search:
    """The search for one prompt."""

    params: BeamSearchParams
    end_token_ids: frozenset[int]
    prompt_ids: tuple[int, ...]
    max_new: int
    live: list[_Beam] = field(default_factory=lambda: [_Beam()])
    finished: list[_Beam] = field(default_factory=list)
    error: str | None = None

    @property
    def prompts(self) -> list[dict[str, list[int]]]:
        """What the next step continues."""
        return [{"prompt_token_ids": [*self.prompt_ids, *each.token_ids]} for each in self.live]

    def take(self, completions: Sequence[Completion]) -> None:
        """Take what a step found for each live sequence, if there are any."""
        if not self.live:
            return
        self.error = next((each.error for each in completions if each.error is not None), None)
        if self.error is not None:
            self.live = []
            return
        width, penalty = self.params.beam_width, self.params.length_penalty
        found = [each.logprobs[0] for each in completions if each.logprobs is not None]
        candidates = [
            (beam.cum_logprob + logprob, beam, token_id)
            for beam, each in zip(self.live, found, strict=True)
            for token_id, logprob in zip(each.top_ids, each.top, strict=True)
        ]
        best = nlargest(_num_candidates(width, self.end_token_ids), candidates, key=lambda each: each[0])
        beams = [beam.followed(token_id, total, penalty) for total, beam, token_id in best]
        self.finished += [each for each in beams[:width] if self._ends(each)]
        self.finished = nlargest(width, self.finished, key=lambda each: each.score)
        self.live = [each for each in beams if not self._ends(each)][:width]
        if len(self.finished) == width and self.live and self.live[0].score <= self.finished[-1].score:
            self.live = []

    def output(self, tokenizer: Any) -> BeamSearchOutput:
        """Return what was found."""
        if self.error is not None:
            return BeamSearchOutput([], self.error)
        return BeamSearchOutput([self._sequence(each, tokenizer) for each in self.finished])

    def _sequence(self, beam: _Beam, tokenizer: Any) -> BeamSearchSequence:
        tokens, is_stopped = [*self.prompt_ids, *beam.token_ids], beam.token_ids[-1] in self.end_token_ids
        shown = tokens[:-1] if is_stopped and not self.params.include_stop_str_in_output else tokens
        text = "" if tokenizer is None else decode(tokenizer, shown, skips_special=False)
        return BeamSearchSequence(tokens, text, beam.cum_logprob, "stop" if is_stopped else "length")

    def _ends(self, beam: _Beam) -> bool:
        return beam.token_ids[-1] in self.end_token_ids or len(beam.token_ids) >= self.max_new


def one_step(params: BeamSearchParams, end_token_ids: frozenset[int]) -> SamplingParams:
    """Return how a step is generated: by one token after each live sequence, with the candidates for it."""
    num = _num_candidates(params.beam_width, end_token_ids)
    return SamplingParams(max_new_tokens=1, logprobs=num, ignore_eos=True, detokenize=False)


def search_beams(
    first: Sequence[Completion],
    generate: Callable[[list[dict[str, list[int]]]], list[Completion]],
    params: BeamSearchParams,
    end_token_ids: frozenset[int],
    limits: LengthLimits,
    tokenizer: Any,
) -> list[BeamSearchOutput]:
    """Return what a search finds for each prompt; see [Note: beams].

    Args:
        first: the first step of each prompt, by `one_step`.
        generate: generates a step after each of several sequences.
        end_token_ids: those that end a sequence.
        limits: of a prompt and its new tokens.
        tokenizer: None: tokens have no text.
    """
    searches = []
    for each in first:
        num_left = limits.most_new(len(each.prompt_token_ids))
        max_new = params.max_tokens if num_left is None else min(params.max_tokens, num_left)
        searches.append(_Search(params, end_token_ids, each.prompt_token_ids, max_new))
        searches[-1].take([each])
    while prompts := [each for search in searches for each in search.prompts]:
        found = iter(generate(prompts))
        for search in searches:
            search.take([next(found) for _ in search.live])
    return [each.output(tokenizer) for each in searches]


def _num_candidates(beam_width: int, end_token_ids: frozenset[int]) -> int:
    """Return how many candidates have ``beam_width`` that do not end among them, if only end tokens end them."""
    return max(2, 1 + len(end_token_ids)) * beam_width
