"""Ends each row of a batch by the row's own conditions: an end token, a stop string, or its number of new tokens."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria

from zinfer.batching.ending import Ending
from zinfer.jobs.prompts import Prompt


@dataclass
class RowProgress:
    """A row under way. `token_ids`: what was generated, the token that ended it included."""

    prompt: Prompt
    ending: Ending
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """What was generated, without end and special tokens, cut before the first stop string."""
        return self.ending.text(self.token_ids)


class RowStops(StoppingCriteria):  # type: ignore[misc]
    """Follows a batch token by token. One instance serves one call of `generate`.

    on_step: called after each step with the number of rows that were still running; it may raise to end the job.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        end_token_ids: Collection[int],
        tokenizer: Any,
        on_step: Callable[[int], None],
    ) -> None:
        self.rows = [RowProgress(prompt, _ending(prompt, end_token_ids, tokenizer)) for prompt in prompts]
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids: [rows, tokens so far]. Returns [rows], True where the row has ended."""
        running = 0
        for row, token_id in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            if row.finish_reason is None:
                running += 1
                row.token_ids.append(token_id)
                row.finish_reason = row.ending.reason(row.token_ids)
        self._on_step(running)
        done = [row.finish_reason is not None for row in self.rows]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def _ending(prompt: Prompt, end_token_ids: Collection[int], tokenizer: Any) -> Ending:
    return Ending(tokenizer, {*end_token_ids, *prompt.stop_token_ids}, prompt.row.stop, prompt.max_new_tokens)
