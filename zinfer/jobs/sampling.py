"""Draws each row's next token by the row's own settings and its own random stream, so that neighbours do not matter.

Runs on the CPU in float64 whatever the model's device: running sums on a GPU are not the same from run to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from zinfer.errors import JobError
from zinfer.jobs.prompts import Prompt


@dataclass(frozen=True)
class Sampling:
    """A row's filters, as in transformers: temperature, then top_k (0: off), then top_p (1: off)."""

    temperature: float
    top_k: int
    top_p: float


def sampling_of(prompt: Prompt) -> Sampling | None:
    """None where the row is greedy."""
    row = prompt.row
    if not row.temperature:
        return None
    return Sampling(row.temperature, row.top_k or 0, 1.0 if row.top_p is None else row.top_p)


def draw(scores_V: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """The token at the quantile `uniform` in [0, 1) of the filtered distribution.

    scores_V: [vocabulary] logits; NaN and +inf are not allowed.
    """
    scaled_V = scores_V.double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        least = torch.topk(scaled_V, sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, -torch.inf)
    weights_V = torch.softmax(scaled_V, dim=0)
    if sampling.top_p < 1:
        ordered_V, order_V = torch.sort(weights_V, descending=True, stable=True)
        before_V = ordered_V.cumsum(0) - ordered_V
        weights_V[order_V[before_V >= sampling.top_p]] = 0
    running_V = weights_V.cumsum(0)
    return int(torch.searchsorted(running_V, uniform * running_V[-1], right=True))


class RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Forces the drawn token of each sampling row; greedy rows' scores pass through.

    Give it to a greedy `generate` as the last processor. One instance serves one call.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._ids = [prompt.row.id for prompt in prompts]
        self._rows = [(i, s) for i, s in enumerate(map(sampling_of, prompts)) if s is not None]
        self._streams = {i: torch.Generator().manual_seed(prompts[i].seed) for i, _ in self._rows}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: [rows, vocabulary]. Raises JobError naming the rows whose logits are not numbers."""
        broken_B = (scores.isnan() | scores.isposinf()).any(dim=1)
        if broken_B.any():
            ids = [self._ids[i] for i in broken_B.nonzero().flatten().tolist()]
            raise JobError(f"the model's logits are not finite numbers in rows {ids[:8]}; its weights may be damaged")
        if not self._rows:
            return scores
        forced = scores.clone()
        drawing = scores[[i for i, _ in self._rows]].cpu()
        for (i, sampling), scores_V in zip(self._rows, drawing, strict=True):
            uniform = float(torch.rand((), generator=self._streams[i], dtype=torch.float64))
            forced[i] = -torch.inf
            forced[i, draw(scores_V, sampling, uniform)] = 0
        return forced
