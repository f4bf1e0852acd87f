"""Completes prompts in padded batches with transformers' own `generate`, for families that know no other way.

End tokens and the padding token come from the model's generation config, else from the tokenizer. The config's
defaults for sampling and repetition (do_sample, temperature, top_k, top_p, repetition_penalty, no_repeat_ngram_size) do
not: a row is greedy unless it asks for a temperature itself, so that a file means the same for every model, and what is
penalised would depend on a row's padding. Nor is an end forced (forced_eos_token_id, BART's): it would come where the
longest of a batch ends.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from zinfer.errors import PlanError
from zinfer.jobs.completer import EngineCompleter, PlannedEngine
from zinfer.jobs.progress import Forecast, Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.text import Text, TextSampler, TextStops
from zinfer.jobs.timeline import Load
from zinfer.jobs.token_rows import left_padded, right_padded
from zinfer.model.context_length import is_encoder_decoder
from zinfer.planning.step_time import Prediction
from zinfer.requests.completion import Completion
from zinfer.requests.stop_criteria import find_end_token_ids
from zinfer.sampling.sampler import Sampler


class Engine(PlannedEngine, Protocol):
    """What padded batches need of an engine beside that."""

    @property
    def module(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    def generate_unchecked(self, **kwargs: Any) -> Any: ...

    def find_broken(self, work: Callable[[], Any], num_rows: int) -> list[str | None]: ...

    def predict(self, batch_size: int, prompt_len: int, new_tokens: int) -> Prediction: ...


class PaddedCompleter(EngineCompleter[Engine]):
    """An engine's batches.

    Args:
        tokenizer: used by the calling thread alone.
        max_tokens: of a prompt and its new tokens; None: no limit.
        meter: told of every step.
    """

    def __init__(self, engine: Engine, tokenizer: Any, max_tokens: int | None, meter: Meter) -> None:
        super().__init__(engine, meter)
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        try:
            predicted = self._engine.predict(**batch_shape(prompts))
        except PlanError as error:
            return Forecast(f"nothing: {error}")
        num_passes = batch_shape(prompts)["new_tokens"]
        text = f"{predicted} (rates: {predicted.origin})"
        return Forecast(text, predicted.tokens_per_s, predicted.seconds, num_passes)

    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, tuple[Completion, ...]], None, None]:
        """As `Completer.complete`."""
        meter = self._meter
        parts = [part for part in fitting_parts(prompts, self._max_tokens) if any(id(each) in wanted for each in part)]
        num_steps = sum(max(prompt.max_new_tokens for prompt in part) for part in parts)

        def on_step(num_running: int) -> None:
            meter.num_tokens += num_running
            meter.batch_share += 1 / num_steps

        for part in parts:
            completions = complete(self._engine, part, self._tokenizer, on_step)
            num_passes = max(1, *(len(each.token_ids) for own in completions for each in own))
            with suppress(PlanError):  # said in the forecast
                shape = batch_shape(part) | {"new_tokens": num_passes}
                self.predicted_s += self._engine.predict(**shape).seconds
            yield from zip(part, completions, strict=True)

    def load(self) -> Load:
        """Tokens of prompts are not counted here."""
        return Load(self._meter.num_tokens, self._meter.num_tokens, self._meter.batch_rows)


def batch_shape(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Texts side by side, tokens of the longest prompt, and the most new ones."""
    return {
        "batch_size": sum(prompt.params.n for prompt in prompts),
        "prompt_len": max(len(prompt.token_ids) for prompt in prompts),
        "new_tokens": max(prompt.max_new_tokens for prompt in prompts),
    }


def complete(
    engine: Engine, prompts: Sequence[Prompt], tokenizer: Any, on_step: Callable[[int], None]
) -> list[tuple[Completion, ...]]:
    """The completions of a batch, in the prompts' order. `on_step` is `TextStops`' own.

    Texts whose logits broke are computed once more, without the others, to learn which layer broke each.
    """
    end_token_ids = find_end_token_ids(engine.module.generation_config, tokenizer)
    pad_token_id = _pad_token_id(engine.module.generation_config, tokenizer, end_token_ids)

    def text(prompt: Prompt, sample: int) -> Text:
        return Text.of(prompt, sample, end_token_ids, tokenizer)

    texts = [text(prompt, sample) for prompt in prompts for sample in range(prompt.params.n)]
    _generate(engine, texts, pad_token_id, on_step)
    broken = [each for each in texts if each.finish_reason == "error"]
    if broken:
        again = [text(each.prompt, each.sample) for each in broken]
        named = engine.find_broken(lambda: _generate(engine, again, pad_token_id, lambda num_running: None), len(again))
        for each, name in zip(broken, named, strict=True):
            each.broken_by = name
    found = iter(texts)
    return [tuple(next(found).completion() for _ in range(prompt.params.n)) for prompt in prompts]


def _generate(engine: Engine, texts: Sequence[Text], pad_token_id: int, on_step: Callable[[int], None]) -> None:
    """Write texts that have no token yet."""
    vocab_size = engine.module.config.get_text_config().vocab_size
    padded = right_padded if is_encoder_decoder(engine.module) else left_padded
    input_ids, attention_mask = padded([text.prompt.token_ids for text in texts], pad_token_id)
    engine.generate_unchecked(
        input_ids=input_ids.to(engine.device),
        attention_mask=attention_mask.to(engine.device),
        logits_processor=LogitsProcessorList([TextSampler(texts, Sampler(vocab_size, engine.device))]),
        stopping_criteria=StoppingCriteriaList([TextStops(texts, on_step)]),
        max_new_tokens=max(text.prompt.max_new_tokens for text in texts),
        eos_token_id=[vocab_size],  # which never comes: each text ends by its own tokens
        pad_token_id=pad_token_id,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        forced_eos_token_id=None,
    )


def fitting_parts(prompts: Sequence[Prompt], max_tokens: int | None) -> list[tuple[Prompt, ...]]:
    """Runs of neighbours in which the longest prompt still has room for the most new tokens that any of them wants.

    All rows of a call take as many steps as the longest needs, so a long prompt with few new tokens would be led past
    the model's positions by a short one with many.
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


def _pad_token_id(generation_config: Any, tokenizer: Any, end_token_ids: Sequence[int]) -> int:
    own = None if tokenizer is None else tokenizer.pad_token_id
    candidates = [generation_config.pad_token_id, own, *end_token_ids]
    # Padding is masked, so that without any of them token 0 does as well.
    return next((token_id for token_id in candidates if token_id is not None and token_id >= 0), 0)
