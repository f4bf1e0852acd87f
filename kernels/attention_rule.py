"""What a layer does to the products of queries and keys before they become weights."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer weighs keys.

    Args:
        scale: products are multiplied by it; above 0.
        window: a token sees so many of the last tokens, itself included; None: all.
        softcap: then ``softcap * tanh(products / softcap)`` (Gemma 2); None: as they are.
        alibi_slopes: [heads] float32, times the distance to the key, are taken off (Press et al. 2022); None: nothing.
        sinks: [heads], one more product a query, whose weight goes nowhere (gpt-oss); None: none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
