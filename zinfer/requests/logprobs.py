"""Log-probabilities of a generated token, where they were asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities under the model's own logits, before biases, penalties, temperature, filters.

    chosen: of the chosen token. top_ids, top: of the most likely tokens, in order, the lower id first among equals.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]
