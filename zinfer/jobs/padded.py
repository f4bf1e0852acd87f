"""Complete prompts in padded batches with transformers' `generate`, for models without continuous batching.

End tokens and the padding token are read from the model's generation config, else from the tokenizer. What else it says
of tokens applies as in continuous batches (`zinfer.requests.generation_config`): by each row's own length and without
the padding, which transformers' processors would count.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from zinfer.engine.engine import InferenceEngine
from zinfer.engine.input_errors import InputErrors
from zinfer.errors import JobError, PlanError
from zinfer.jobs.completer import Completer
from zinfer.jobs.progress import Forecast, Load
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.token_rows import padded
from zinfer.model.context_length import is_encoder_decoder
from zinfer.model.padding import RowSharing, reset_rotary
from zinfer.planning.step_time import speed
from zinfer.requests.completion import Completion, choose_seed, not_finite
from zinfer.requests.generation_config import NO_DEFAULTS, NO_RULES, GenerationDefaults, TokenRules
from zinfer.requests.logprobs import Logprobs
from zinfer.requests.prompt_end import PromptEnd, find_prompt_end
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.stop_criteria import StopCriteria, find_end_token_ids
from zinfer.sampling.sampler import Row, Sampler, row_uniform
from zinfer.units import duration

_NO_PROCESSORS: Final[dict[str, Any]] = {
    **{"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    **{"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "min_length": 0},
    **dict.fromkeys(
        [
            *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_new_tokens", "min_p", "max_time"),
            *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "sequence_bias"),
            *("guidance_scale", "watermarking_config", "stop_strings"),
        ]
    ),
}
"""Keywords that keep transformers from what the model's generation config says of tokens."""


class PaddedCompleter(Completer):
    """Completes prompts with an engine's `generate`.

    Args:
        tokenizer: used only by the calling thread.
        max_tokens: limit for a prompt and its new tokens together; None: no limit.
        sharing: which rows may share a call of `generate`.
        input_errors: as for `Completer`.
        defaults: of the model's generation config.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        max_tokens: int | None,
        sharing: RowSharing,
        input_errors: InputErrors,
        defaults: GenerationDefaults,
    ) -> None:
        super().__init__(engine.stats, engine.destroy, input_errors)
        self._defaults = defaults
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._sharing = sharing

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        shapes = [batch_shape(part) for part in self._parts(prompts)]
        num_passes = sum(shape["new_tokens"] for shape in shapes)
        try:
            several = [self._engine.predict(**shape) for shape in shapes]
        except PlanError as error:
            return Forecast(f"nothing: {error}", num_passes=num_passes)
        seconds = sum(each.seconds for each in several)
        num_new = sum(shape["batch_size"] * shape["new_tokens"] for shape in shapes)
        groups = f" over {len(several)} groups of rows" if len(several) > 1 else ""
        bound = max(several, key=lambda each: each.seconds).decode.bottleneck
        text = f"{duration(seconds)} for {num_passes:,} passes{groups} ({bound}), {speed(num_new / seconds)}"
        return Forecast(f"{text}; rates {several[0].origin}", num_new / seconds, seconds, num_passes)

    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, tuple[Completion, ...]], None, None]:
        """See `Completer.complete`."""
        problems = {id(prompt): problem for prompt in prompts if (problem := _problem(prompt.params)) is not None}
        for prompt in prompts:
            if (problem := problems.get(id(prompt))) is not None:
                yield prompt, tuple(Completion.failed(0, sample, problem) for sample in range(prompt.params.n))
        for part in self._parts([each for each in prompts if id(each) not in problems]):
            if not any(id(each) in wanted for each in part):
                continue
            completions = complete(self._engine, part, self._tokenizer, self._count, self._defaults)
            num_passes = max(1, *(len(each.token_ids) for own in completions for each in own))
            with suppress(PlanError):  # the forecast reports it
                self.predicted_s += self._engine.predict(**batch_shape(part) | {"new_tokens": num_passes}).seconds
            yield from zip(part, completions, strict=True)

    def _parts(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, ...]]:
        """Yield the prompts of each call of `generate`."""
        groups = self._sharing.groups(
            prompts, lambda prompt: len(prompt.token_ids), lambda prompt: prompt.max_new_tokens
        )
        for group, border in groups:
            limits = [each for each in (self._max_tokens, border) if each is not None]
            yield from fitting_parts(group, min(limits, default=None))

    def _count(self, num_running: int) -> None:
        """Count one decoding step; prompt tokens are not counted."""
        load = self._load
        num_new = load.num_new_tokens + num_running
        self._load = Load(load.num_passes + 1, num_new, num_new, num_running)


@dataclass
class PaddedSequence:
    """A running completion: its tokens so far, and its row's stop criteria.

    Attributes:
        token_ids: the generated tokens, including the one that ended the sequence.
        broken_by: the module that first produced non-finite numbers, if it was searched for.
    """

    prompt: Prompt
    sample: int
    seed: int
    end_token_ids: frozenset[int]
    stop_criteria: StopCriteria
    rules: TokenRules = NO_RULES
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    broken_by: str | None = None

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        sample: int,
        end_token_ids: Collection[int],
        tokenizer: Any,
        prompt_end: PromptEnd,
        rules: TokenRules = NO_RULES,
    ) -> "PaddedSequence":
        """Return a new sequence without tokens."""
        params = prompt.params
        ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        seed = choose_seed(params.seed, prompt.token_ids, sample)
        return cls(prompt, sample, seed, ends, StopCriteria(tokenizer, params, ends, prompt_end), rules)

    def row(self) -> Row:
        """Return the sampler's input for the next token."""
        prompt, uniform_at = self.prompt, partial(row_uniform, self.seed)
        given = prompt.params, prompt.token_ids, self.token_ids, self.end_token_ids, uniform_at, prompt.bad_word_ids
        return Row(*given, rules=self.rules)

    def completion(self) -> Completion:
        """Return the finished completion."""
        if self.finish_reason is None:
            raise JobError(
                f"generation ended row {self.prompt.row.id!r} after {len(self.token_ids)} tokens for a reason of its "
                "own; look for limits in the model's generation_config.json"
            )
        token_ids = tuple(self.token_ids)
        if self.finish_reason == "error":
            return Completion(0, self.sample, "", token_ids, "error", error=not_finite(self.broken_by))
        logprobs = None if self.prompt.params.logprobs is None else tuple(self.logprobs)
        stop_reason = self.stop_criteria.stop_reason(token_ids) if self.finish_reason == "stop" else None
        text = self.stop_criteria.text(token_ids)
        seed = None if self.prompt.params.is_greedy else self.seed
        return Completion(
            0,
            self.sample,
            text,
            token_ids,
            self.finish_reason,
            logprobs,
            stop_reason=stop_reason,
            seed=seed,
            prompt_token_ids=self.prompt.token_ids,
        )


class SequenceSampler(LogitsProcessor):  # type: ignore[misc]
    """Samples each sequence's next token and forces `generate` to choose it. Use as the only processor, with greedy.

    on_step: called once per step with the number of sequences that get a token; it may raise to end the job.
    """

    def __init__(self, sequences: Sequence[PaddedSequence], sampler: Sampler, on_step: Callable[[int], None]) -> None:
        self._sequences, self._sampler, self._on_step = sequences, sampler, on_step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Sample from scores [sequences, vocabulary]. Non-finite logits end only their own sequence, with an error."""
        places = [place for place, each in enumerate(self._sequences) if each.finish_reason is None]
        running = [self._sequences[place] for place in places]
        sampled = self._sampler.sample(scores[places], [sequence.row() for sequence in running])
        for i in sampled.broken:
            running[i].finish_reason = "error"
        for sequence, token_id, logprobs in zip(running, sampled.token_ids, sampled.logprobs, strict=True):
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            if sequence.finish_reason is None:
                sequence.token_ids.append(token_id)
                sequence.finish_reason = sequence.stop_criteria.reason(sequence.token_ids)
        self._on_step(len(running) - len(sampled.broken))
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 0] = 0  # for sequences that have ended
        forced[places, 0] = -torch.inf
        forced[places, [max(token_id, 0) for token_id in sampled.token_ids]] = 0
        return forced

    def ended(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Stopping criterion for `generate`: return which sequences have ended, [sequences]."""
        done = [sequence.finish_reason is not None for sequence in self._sequences]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def batch_shape(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Return the number of sequences, the longest prompt, and the most new tokens of a batch."""
    return {
        "batch_size": sum(prompt.params.n for prompt in prompts),
        "prompt_len": max(len(prompt.token_ids) for prompt in prompts),
        "new_tokens": max(prompt.max_new_tokens for prompt in prompts),
    }


def complete(
    engine: InferenceEngine,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    on_step: Callable[[int], None],
    defaults: GenerationDefaults = NO_DEFAULTS,
) -> list[tuple[Completion, ...]]:
    """Return the completions of a batch, in the prompts' order; see `SequenceSampler` for `on_step`.

    Sequences with non-finite logits are recomputed alone to find the layer at fault. ``defaults`` are those of the
    model's generation config.
    """
    end_token_ids = find_end_token_ids(engine.module.generation_config, tokenizer)
    pad_token_id = find_generation_pad(engine.module, tokenizer)

    has_encoder = is_encoder_decoder(engine.module)

    def sequence(prompt: Prompt, sample: int) -> PaddedSequence:
        read = () if has_encoder else prompt.token_ids  # a decoder behind an encoder begins a text of its own
        prompt_end = find_prompt_end(tokenizer, read, skips_special=prompt.params.skip_special_tokens)
        return PaddedSequence.of(prompt, sample, end_token_ids, tokenizer, prompt_end, defaults.rules)

    prompts = [_filled(prompt, defaults) for prompt in prompts]
    sequences = [sequence(prompt, sample) for prompt in prompts for sample in range(prompt.params.n)]
    _generate(engine, sequences, pad_token_id, on_step)
    broken = [each for each in sequences if each.finish_reason == "error"]
    if broken:
        again = [sequence(each.prompt, each.sample) for each in broken]
        named = engine.find_broken(lambda: _generate(engine, again, pad_token_id, lambda num_running: None), len(again))
        for each, name in zip(broken, named, strict=True):
            each.broken_by = name
    found = iter(sequences)
    return [tuple(next(found).completion() for _ in range(prompt.params.n)) for prompt in prompts]


def _generate(
    engine: InferenceEngine, sequences: Sequence[PaddedSequence], pad_token_id: int, on_step: Callable[[int], None]
) -> None:
    """Generate the tokens of new sequences."""
    vocab_size = engine.module.config.get_text_config().vocab_size
    side = "right" if is_encoder_decoder(engine.module) else "left"
    input_ids, attention_mask = padded([sequence.prompt.token_ids for sequence in sequences], pad_token_id, side)
    sampler = SequenceSampler(sequences, Sampler(vocab_size, engine.device), on_step)
    reset_rotary(engine.module)
    engine.generate_unchecked(
        input_ids=input_ids.to(engine.device),
        attention_mask=attention_mask.to(engine.device),
        logits_processor=LogitsProcessorList([sampler]),
        stopping_criteria=StoppingCriteriaList([sampler.ended]),
        max_new_tokens=max(sequence.prompt.max_new_tokens for sequence in sequences),
        eos_token_id=[vocab_size],  # never sampled: each sequence has its own end tokens
        pad_token_id=pad_token_id,
        do_sample=False,
        num_beams=1,
        **_NO_PROCESSORS,
    )


def _filled(prompt: Prompt, defaults: GenerationDefaults) -> Prompt:
    """Return a prompt whose params have the defaults."""
    params = defaults.fill(prompt.row.params)
    if params is prompt.row.params:
        return prompt
    return replace(prompt, row=prompt.row.model_copy(update={"params": params}))


def fitting_parts(prompts: Sequence[Prompt], max_tokens: int | None) -> list[tuple[Prompt, ...]]:
    """Split prompts into runs of neighbours whose longest prompt plus most new tokens fit ``max_tokens``.

    All rows of a `generate` call take the same number of steps. A short prompt with many new tokens would push a long
    prompt with few past the model's positions.
    """
    parts: list[list[Prompt]] = []
    num_prompt = num_new = 0
    for prompt in prompts:
        num_prompt = max(num_prompt, len(prompt.token_ids))
        num_new = max(num_new, prompt.max_new_tokens)
        if not parts or (max_tokens is not None and num_prompt + num_new > max_tokens):
            parts.append([])
            num_prompt, num_new = len(prompt.token_ids), prompt.max_new_tokens
        parts[-1].append(prompt)
    return [tuple(part) for part in parts]


def _problem(params: SamplingParams) -> str | None:
    """Return what of a row's params a padded batch cannot do."""
    needing = {"structured_outputs": params.structured_outputs, "prompt_logprobs": params.prompt_logprobs}
    if (name := next((name for name, value in needing.items() if value is not None), None)) is None:
        return None
    return f"{name} needs continuous batching, which this model does not support; leave it out, or use another model"


def find_generation_pad(model: PreTrainedModel, tokenizer: Any) -> int:
    """Return the token that pads the prompts of `generate`."""
    generation_config = model.generation_config
    end_token_ids = find_end_token_ids(generation_config, tokenizer)
    own = None if tokenizer is None else tokenizer.pad_token_id
    candidates = [generation_config.pad_token_id, own, *end_token_ids]
    # Padding is masked, so token 0 works too.
    return next((token_id for token_id in candidates if token_id is not None and token_id >= 0), 0)
