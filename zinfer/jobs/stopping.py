"""Ends each row of a batch by the row's own conditions: an end token, a stop string, or its number of new tokens."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria

from zinfer.jobs.prompts import Prompt

# A stop string of n bytes spans at most n tokens, bar tokens without text; those few are allowed for.
_SPARE_TOKENS = 8


@dataclass
class RowProgress:
    """A row under way. `token_ids`: what was generated, the token that ended it included."""

    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


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
        self.rows = [RowProgress(prompt) for prompt in prompts]
        self._end_token_ids = frozenset(end_token_ids)
        self._tokenizer = tokenizer
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids: [rows, tokens so far]. Returns [rows], True where the row has ended."""
        running = 0
        for row, token_id in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            if row.finish_reason is None:
                running += 1
                row.token_ids.append(token_id)
                row.finish_reason = self._reason(row)
        self._on_step(running)
        done = [row.finish_reason is not None for row in self.rows]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    def text_of(self, row: RowProgress) -> str:
        """The row's text: without end and special tokens, cut before the first stop string."""
        text = self._decode(row.token_ids[:-1] if self._ends(row) else row.token_ids)
        places = [place for stop in row.prompt.row.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _reason(self, row: RowProgress) -> str | None:
        if self._ends(row) or self._has_stop_string(row):
            return "stop"
        return "length" if len(row.token_ids) == row.prompt.max_new_tokens else None

    def _ends(self, row: RowProgress) -> bool:
        newest = row.token_ids[-1]
        return newest in self._end_token_ids or newest in row.prompt.stop_token_ids

    def _has_stop_string(self, row: RowProgress) -> bool:
        stops = row.prompt.row.stop
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS
        tail = self._decode(row.token_ids[-window:])
        if not any(stop in tail for stop in stops):
            return False
        whole = self._decode(row.token_ids)
        return any(stop in whole for stop in stops)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
