"""Narrower ranges for a group's codes than its extremes: clipping an outlier leaves the other values finer steps."""

from typing import Final

import torch

from zinfer.kernels.quantize import decode, encode, fit, full_range
from zinfer.kernels.quantized import QuantFormat

_LEAST_SHARE: Final = 0.5  # of the extremes; AWQ's search (Lin et al. 2023) goes as far down
_NUM_SHARES: Final = 20


def least_error_range(
    groups: torch.Tensor, format: QuantFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of each group's extremes, of 20 between a half and all, that give it the least squared error.

    Args:
        groups: [rows, groups, columns of a group], float32.
        format: of the codes; where rows share their scales, the widest range among them counts in the end.
        dtype: of the scales.

    Returns:
        Least and largest value to be covered, each [rows, groups].
    """
    low, high = full_range(groups, format, dtype)
    best = [low, high, _squared_error(groups, low, high, format, dtype)]
    for step in range(1, _NUM_SHARES + 1):
        share = 1 - step / _NUM_SHARES * (1 - _LEAST_SHARE)
        error = _squared_error(groups, low * share, high * share, format, dtype)
        is_better = error < best[2]
        best = [
            torch.where(is_better, new, old) for new, old in zip((low * share, high * share, error), best, strict=True)
        ]
    return best[0], best[1]


def _squared_error(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, format: QuantFormat, dtype: torch.dtype
) -> torch.Tensor:
    scales, zeros = fit(low, high, format, dtype)
    decoded = decode(encode(groups, scales, zeros, format), scales, zeros)
    return (decoded - groups).square_().sum(-1)
