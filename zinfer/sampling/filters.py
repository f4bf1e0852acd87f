"""Token likelihoods as integers, the filters on them, and the draw; stateless and independent of requests.

Cumulative sums of floats on a GPU depend on the number of rows: torch's scan divides its threads between rows and
columns, and uses another algorithm for a single row. Sums of integers do not depend on their order. So a token's
likelihood relative to the row's most likely token is computed in float64 and rounded to a 64-bit fixed-point number;
a row's tokens are then the same in every batch. The cost: in a vocabulary of 2**17 a token less than 2**-46 as likely
as the most likely one is never drawn.
"""

from collections.abc import Sequence

import torch

from zinfer.requests.sampling_params import SamplingParams
from zinfer.sampling.async_copy import send


def unit_of(vocab_size: int) -> int:
    """Return the fixed-point number for 1, such that `vocab_size` of them sum to at most 2**62."""
    return int(2 ** (62 - (vocab_size - 1).bit_length()))


def ratios_of(logits_RV: torch.Tensor, peak_R: torch.Tensor, temperature_R1: torch.Tensor | float = 1) -> torch.Tensor:
    """Return each token's likelihood relative to its row's most likely one: [rows, vocabulary] float64 in [0, 1].

    peak_R: the rows' maximum logits, finite; subtracted first, so that small temperatures do not overflow.
    """
    return ((logits_RV.double() - peak_R.double()[:, None]) / temperature_R1).exp_()


def fixed_point(ratios_RV: torch.Tensor) -> torch.Tensor:
    """Round `ratios_of` to int64, in units of `unit_of(vocabulary)`."""
    return (ratios_RV * unit_of(ratios_RV.shape[1])).round_().long()


def kind_of(params: SamplingParams, vocab_size: int) -> tuple[bool, bool]:
    """Return whether top_k and top_p have an effect; rows of the same kind are drawn together."""
    return 0 < params.top_k < vocab_size, params.top_p < 1


def draw(
    logits_RV: torch.Tensor, peak_R: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Return each row's token at the quantile `uniform` of its filtered distribution, by token id: [rows] int64.

    logits_RV: [rows, vocabulary], -inf for forbidden tokens, no NaN. peak_R: their maximum, finite.
    params: of rows that are not greedy, all of one `kind_of`. uniforms: in [0, 1).
    """
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    has_top_k, has_top_p = kind_of(params[0], vocab_size)
    assert all(kind_of(p, vocab_size) == (has_top_k, has_top_p) for p in params)
    assert all(0 <= uniform < 1 for uniform in uniforms)
    ratios_RV = ratios_of(logits_RV, peak_R, _column([p.temperature for p in params], device))
    weights_RV = fixed_point(ratios_RV)
    if any(p.min_p > 0 for p in params):
        weights_RV.masked_fill_(ratios_RV < _column([p.min_p for p in params], device), 0)
    if has_top_k:
        weights_RV.masked_fill_(logits_RV < _least_of_top(logits_RV, [p.top_k for p in params]), 0)
    if has_top_p:
        _keep_nucleus(weights_RV, _column([p.top_p for p in params], device))
    running_RV = weights_RV.cumsum(1)
    # Below the total for every uniform below 1: even the product with 1 - 2**-53 is rounded downwards.
    target_R1 = (_column(uniforms, device) * running_RV[:, -1:].double()).long()
    return torch.searchsorted(running_RV, target_R1, right=True)[:, 0]


def _least_of_top(logits_RV: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Return the logit of each row's `top_k`-th token, [rows, 1]; tokens with an equal logit are kept too."""
    places_R1 = send(top_k, torch.int64, logits_RV.device)[:, None] - 1
    return torch.topk(logits_RV, max(top_k)).values.gather(1, places_R1)


def _keep_nucleus(weights_RV: torch.Tensor, top_p_R1: torch.Tensor) -> None:
    """Zero, in place, each token whose predecessors by likelihood (ties by id) already sum to `top_p`."""
    ordered_RV, order_RV = torch.sort(weights_RV, dim=1, descending=True, stable=True)
    running_RV = ordered_RV.cumsum(1)
    before_RV = running_RV - ordered_RV
    ordered_RV.masked_fill_(before_RV.double() >= top_p_R1 * running_RV[:, -1:].double(), 0)
    weights_RV.scatter_(1, order_RV, ordered_RV)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return send(values, torch.float64, device)[:, None]
