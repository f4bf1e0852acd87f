"""Reference sampler: draws one row on the CPU in float64, to compare batches with."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """A row's filters, as in transformers: temperature, then top_k (0: off), then top_p (1: off)."""

    temperature: float
    top_k: int
    top_p: float


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
