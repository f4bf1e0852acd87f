"""Log-probabilities of a generated token."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities from the model's raw logits, before biases, grammars, penalties, temperature and
    filters.

    chosen: of the chosen token. top_ids, top: the most likely tokens in order; ties are ordered by id.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]
