"""Texts of a padded batch under way: their next tokens, and when they end, each by its own row's settings."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from zinfer.errors import JobError
from zinfer.jobs.prompts import Prompt
from zinfer.requests.completion import Completion, not_finite, text_seed
from zinfer.requests.logprobs import Logprobs
from zinfer.requests.stop_criteria import StopCriteria
from zinfer.sampling.sampler import Row, Sampler, row_uniform


@dataclass
class Text:
    """One completion under way.

    Attributes:
        token_ids: what was generated, the token that ended it included.
        broken_by: what gave the first of the numbers that ended it as none, where that was looked for.
    """

    prompt: Prompt
    sample: int
    end_token_ids: frozenset[int]
    ending: StopCriteria
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    broken_by: str | None = None

    @classmethod
    def of(cls, prompt: Prompt, sample: int, end_token_ids: Collection[int], tokenizer: Any) -> "Text":
        """A text that has no token yet."""
        params = prompt.params
        ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        return cls(prompt, sample, ends, StopCriteria.of(tokenizer, params, ends))

    def row(self) -> Row:
        """What its next token depends on."""
        params, prompt_ids = self.prompt.params, self.prompt.token_ids
        seed = text_seed(params.seed, prompt_ids, 0, self.sample)
        uniform_at = partial(row_uniform, seed)
        return Row(params, prompt_ids, self.token_ids, self.end_token_ids, uniform_at, self.prompt.bad_word_ids)

    def completion(self) -> Completion:
        """What it came to."""
        if self.finish_reason is None:
            raise JobError(
                f"generation ended row {self.prompt.row.id!r} after {len(self.token_ids)} tokens for a reason of its "
                "own; remove limits such as max_time from the model's generation_config.json"
            )
        if self.finish_reason == "error":
            return Completion(0, self.sample, "", tuple(self.token_ids), "error", error=not_finite(self.broken_by))
        logprobs = None if self.prompt.params.logprobs is None else tuple(self.logprobs)
        return Completion(
            prompt_index=0,
            sample_index=self.sample,
            text=self.ending.text(self.token_ids),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            stop_reason=self.ending.stop_reason(self.token_ids) if self.finish_reason == "stop" else None,
        )


class TextSampler(LogitsProcessor):  # type: ignore[misc]
    """Forces each text's next token. Give it to a greedy `generate` as the only processor; it serves one call."""

    def __init__(self, texts: Sequence[Text], sampler: Sampler) -> None:
        self._texts = texts
        self._sampler = sampler

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: [texts, vocabulary]. A text whose logits are not numbers ends with an error, the others go on."""
        running = [i for i, text in enumerate(self._texts) if text.finish_reason is None]
        sampled = self._sampler.sample(scores[running], [self._texts[i].row() for i in running])
        for i in sampled.broken:
            self._texts[running[i]].finish_reason = "error"
        for i, logprobs in zip(running, sampled.logprobs, strict=True):
            if logprobs is not None:
                self._texts[i].logprobs.append(logprobs)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 0] = 0  # of texts that have ended
        forced[running, 0] = -torch.inf
        forced[running, [max(token_id, 0) for token_id in sampled.token_ids]] = 0
        return forced


class TextStops(StoppingCriteria):  # type: ignore[misc]
    """Follows a batch token by token. One instance serves one call of `generate`.

    on_step: called after each step with the number of texts that were still running; it may raise to end the job.
    """

    def __init__(self, texts: Sequence[Text], on_step: Callable[[int], None]) -> None:
        self._texts = texts
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids: [texts, tokens so far]. Returns [texts], True where the text has ended."""
        running = 0
        for text, token_id in zip(self._texts, input_ids[:, -1].tolist(), strict=True):
            if text.finish_reason is None:
                running += 1
                text.token_ids.append(token_id)
                text.finish_reason = text.ending.reason(text.token_ids)
        self._on_step(running)
        done = [text.finish_reason is not None for text in self._texts]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)
