"""Scales columns before rounding, so that columns with large activations are rounded more exactly.

The search is AWQ's (Lin et al. 2023, "Activation-aware Weight Quantization"): scales are powers of the activations'
magnitudes, with the exponent of the least error of the product, assuming that columns of activations are independent.
"""

from typing import Final

import torch

from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import Bounds, CannotQuantize, full_range, quantize_into
from zinfer.kernels.quantized import QuantizedMatrix

_NUM_POWERS: Final = 20  # between 0 and 1, as AWQ tries
_LEAST_SHARE: Final = 1e-4  # of the largest magnitude: an unused column must not get an infinite scale
_SLICE_ELEMENTS: Final = 4 << 20


def scale_columns_into(
    target: QuantizedMatrix, matrix: torch.Tensor, squares: torch.Tensor, bounds: Bounds = full_range
) -> None:
    """As `quantize_into`, with scales of columns that minimize the product's error.

    Args:
        target: its format scales columns.
        matrix: [rows, columns], floating-point.
        squares: mean square of the activations of each column, [columns].
        bounds: as `quantize_into`.

    Raises:
        CannotQuantize: as `quantize_into`, or ``squares`` are not finite.
    """
    assert target.column_scales is not None
    if not bool(torch.isfinite(squares).all()):
        raise CannotQuantize("activations of the calibration are not finite")
    squares = squares.to(matrix.device, torch.float32)
    best, least = torch.ones_like(squares), torch.tensor(float("inf"), device=matrix.device)
    for step in range(_NUM_POWERS + 1):
        scales = _scales(squares, step / _NUM_POWERS)
        target.column_scales.copy_(scales)
        try:
            quantize_into(target, matrix, bounds)
        except CannotQuantize:  # values divided by small scales may overflow the dtype
            if step == 0:
                raise
            continue
        error = weighted_error(target, matrix, squares)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    target.column_scales.copy_(best)
    quantize_into(target, matrix, bounds)


def weighted_error(quantized: QuantizedMatrix, matrix: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of products, summed over rows: a float32 scalar.

    Args:
        matrix: [rows, columns], the full weights.
        squares: mean square of the activations of each column, [columns] float32.
    """
    total = torch.zeros((), dtype=torch.float32, device=matrix.device)
    for rows in quantized.slices(_SLICE_ELEMENTS):
        error = dequantize_ref(quantized.part(rows), torch.float32) - matrix[rows].float()
        total += error.square_().sum(0) @ squares
    return total


def _scales(squares: torch.Tensor, power: float) -> torch.Tensor:
    """Return the scales of columns, about 1: small where activations are large."""
    magnitudes = squares.sqrt()
    magnitudes = (
        magnitudes.clamp(min=float(magnitudes.max()) * _LEAST_SHARE) if bool(magnitudes.any()) else magnitudes + 1
    )
    scales = magnitudes.pow(-power)
    return scales / (scales.max() * scales.min()).sqrt()
