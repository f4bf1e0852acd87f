"""Quantizes matrices by rounding to nearest: vectorised torch on any device, a slice of rows at a time."""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from zinfer.kernels.marlin_layout import codes_in_fragments, put_scales
from zinfer.kernels.quantized import FLOAT8, SYMMETRIC_INT4_ZERO, QuantFormat, QuantizedMatrix

_LEAST_SHARE: Final = 0.5  # of a group's extremes; AWQ's search (Lin et al. 2023) goes as far down
_NUM_SHARES: Final = 20
_SLICE_ELEMENTS: Final = 2 << 20  # 8 MiB in float32: stays in the caches, and is what quantizing takes, a few times

Bounds: TypeAlias = Callable[[torch.Tensor, QuantFormat, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""The range that each group's codes are to cover: groups [rows, groups, columns of a group] (float32), the format and
the scales' dtype in; least and largest value out, each [rows, groups] (float32)."""


class CannotQuantize(ValueError):
    """A matrix holds what no scale covers; says what and where."""


def full_range(groups: torch.Tensor, format: QuantFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest value of each group: nothing is clipped."""
    return groups.amin(-1), groups.amax(-1)


def least_error_range(
    groups: torch.Tensor, format: QuantFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of each group's extremes, of 20 between a half and all, that give it the least squared error.

    Clipping an outlier leaves the other values finer steps.

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


def quantize_into(target: QuantizedMatrix, matrix: torch.Tensor, bounds: Bounds = full_range) -> None:
    """Fill ``target`` with the codes nearest to ``matrix`` [rows, columns] (floating-point, any strides).

    Scales of columns are taken as they are; `scaling.scale_columns_into` chooses them. Columns keep their order.

    Scales are rounded up to their dtype first, so that every element within the bounds is off by at most half a step of
    the stored scale (for floating-point codes: half the distance of the codes around it).

    Raises:
        CannotQuantize: an infinity, a NaN, or magnitudes that a scale of the target's dtype does not reach.
    """
    assert matrix.shape == (target.rows, target.columns)
    assert target.column_order is None
    slices = list(target.slices(_SLICE_ELEMENTS))
    ranges = [bounds(_grouped(matrix, rows, target), target.format, target.dtype) for rows in slices]
    low, high = (torch.cat(part) for part in zip(*ranges, strict=True))
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):  # what is not finite is an extreme of its group
        row, column = torch.isfinite(matrix).logical_not_().nonzero()[0].tolist()
        raise CannotQuantize(f"row {row}, column {column} is {matrix[row, column].item()}")
    scales, zeros = fit(
        _shared(low, target, torch.amin), _shared(high, target, torch.amax), target.format, target.dtype
    )
    if not bool(torch.isfinite(scales).all()):
        raise CannotQuantize(f"magnitudes up to {matrix.abs().max().item():g} need scales beyond {target.dtype}")
    put_scales(target, scales)
    if target.zeros is not None and zeros is not None:
        target.zeros.copy_(zeros)
    for rows in slices:
        zeros_of = None if zeros is None else zeros[rows]
        target.codes[rows] = _packed(
            encode(_grouped(matrix, rows, target), scales[rows], zeros_of, target.format), target
        )


def quantize(
    matrix: torch.Tensor, format: QuantFormat, dtype: torch.dtype | None = None, bounds: Bounds = full_range
) -> QuantizedMatrix:
    """A matrix in a format, as `quantize_into`; ``dtype`` of scales and products, by default the matrix's own."""
    rows, columns = matrix.shape
    target = QuantizedMatrix.empty(format, rows, columns, dtype or matrix.dtype, matrix.device)
    quantize_into(target, matrix, bounds)
    return target


def fit(
    low: torch.Tensor, high: torch.Tensor, format: QuantFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales in ``dtype`` and zeros (float32, whole numbers) whose codes cover from ``low`` to ``high``, and 0."""
    first, last = format.code_range
    if format.symmetric:
        return _rounded_up(_divided(torch.maximum(-low, high), last), dtype), None
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = _rounded_up(_divided(high - low, last - first), dtype)
    return scales, _in_steps(-low, scales).round().clamp(first, last)


def encode(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, format: QuantFormat) -> torch.Tensor:
    """The nearest codes of groups [rows, groups, columns of a group], before they are packed, in the same shape.

    Whole numbers are in float32; 0 is the middle of a symmetric format.
    """
    first, last = format.code_range
    steps = _in_steps(groups, scales.unsqueeze(-1))
    if format.is_float:
        return steps.clamp(first, last).to(FLOAT8)
    if zeros is not None:
        steps = steps + zeros.unsqueeze(-1)
    return steps.round_().clamp_(first, last)


def decode(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """The values (float32) of what `encode` gives."""
    values = codes.float()
    if zeros is not None:
        values = values - zeros.float().unsqueeze(-1)
    return values * scales.float().unsqueeze(-1)


def _grouped(matrix: torch.Tensor, rows: slice, target: QuantizedMatrix) -> torch.Tensor:
    """Rows in float32, [rows, groups, columns of a group]."""
    values = matrix[rows].float()
    if target.column_scales is not None:
        values = values / target.column_scales.float()
    return values.reshape(values.shape[0], target.format.num_groups(target.columns), -1)


def _shared(bound: torch.Tensor, target: QuantizedMatrix, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The bound over all the rows that share their scales, for each of them."""
    group_rows = target.format.group_rows or target.rows
    if group_rows == 1:
        return bound
    return reduce(bound.view(-1, group_rows, bound.shape[1]), dim=1).repeat_interleave(group_rows, dim=0)


def _packed(codes: torch.Tensor, target: QuantizedMatrix) -> torch.Tensor:
    codes = codes.view(codes.shape[0], -1)
    if target.format.bits == 8:
        return codes.to(target.format.codes_dtype)
    codes = (codes + SYMMETRIC_INT4_ZERO if target.format.symmetric else codes).to(torch.uint8)
    return pack_int4(codes, in_fragments=target.format.in_fragments)


def pack_int4(codes: torch.Tensor, *, in_fragments: bool = False) -> torch.Tensor:
    """Codes 0 to 15 [rows, columns] (uint8), two a byte: [rows, ceil(columns / 2)], the first in the low half.

    ``in_fragments``: in the order of fragments; rows are of whole blocks.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes_in_fragments(packed) if in_fragments else packed


def _in_steps(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values as multiples of their scales; the scale of a group of zeros is 0. One over a scale may be infinite."""
    steps = scales.float()
    return values / torch.where(steps > 0, steps, 1)


def _divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """Values over a number, alike on every device: by a plain number torch divides as a product on a GPU."""
    return values / torch.full_like(values, number)


def _rounded_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Non-negative float32 numbers in ``dtype``, none smaller than it was."""
    rounded = scales.to(dtype)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]  # the next larger float of a kind has the next pattern
    return torch.where(rounded.float() < scales, (rounded.view(bits) + 1).view(dtype), rounded)
