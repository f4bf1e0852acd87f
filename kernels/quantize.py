"""Quantizes matrices by rounding to nearest: vectorised torch on any device, a slice of rows at a time."""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from zinfer.kernels.marlin_layout import codes_in_fragments, put_scales
from zinfer.kernels.quantized import SYMMETRIC_INT4_ZERO, QuantFormat, QuantizedMatrix

_LEAST_SHARE: Final = 0.5  # of a group's extremes; AWQ's search (Lin et al. 2023) has the same limit
_NUM_SHARES: Final = 20
_SLICE_ELEMENTS: Final = 2 << 20  # 8 MiB in float32, which fits the caches; quantizing allocates a few times this

Bounds: TypeAlias = Callable[[torch.Tensor, QuantFormat, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""Returns the range that each group's codes must cover. Arguments: groups [rows, groups, columns of a group] (float32),
the format and the scales' dtype. Result: least and largest value, each [rows, groups] (float32)."""


class CannotQuantize(ValueError):
    """A matrix holds a value that no scale covers; the message says which and where."""


def full_range(groups: torch.Tensor, format: QuantFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and largest value of each group, without clipping."""
    return groups.amin(-1), groups.amax(-1)


def least_error_range(
    groups: torch.Tensor, format: QuantFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range of each group with the least squared error, of 20 shares of its extremes between 0.5 and 1.

    Clipping an outlier leaves the other values finer steps.

    Args:
        groups: [rows, groups, columns of a group], float32.
        format: of the codes; if rows share their scales, the widest range among them is used in the end.
        dtype: of the scales.

    Returns:
        Least and largest value to cover, each [rows, groups].
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

    Uses the target's scales of columns, which `scaling.scale_columns_into` chooses. Columns keep their order.

    Scales are rounded up to their dtype first, so that the error of every element within the bounds is at most half a
    step of the stored scale (for floating-point codes: half the distance of the neighbouring codes).

    Raises:
        CannotQuantize: an infinity, a NaN, or magnitudes beyond a scale of the target's dtype.
    """
    assert matrix.shape == (target.rows, target.columns)
    assert target.column_order is None
    is_written = target.format.has_plain_scales and (target.format.bits == 8 or not target.format.is_float)
    assert is_written, "published formats are read, not written"
    slices = list(target.slices(_SLICE_ELEMENTS))
    ranges = [bounds(_grouped(matrix, rows, target), target.format, target.dtype) for rows in slices]
    low, high = (torch.cat(part) for part in zip(*ranges, strict=True))
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):  # a non-finite value is an extreme of its group
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
    """Quantize a matrix as `quantize_into`; ``dtype`` of scales and products, by default the matrix's own."""
    rows, columns = matrix.shape
    target = QuantizedMatrix.empty(format, rows, columns, dtype or matrix.dtype, matrix.device)
    quantize_into(target, matrix, bounds)
    return target


def fit(
    low: torch.Tensor, high: torch.Tensor, format: QuantFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales in ``dtype`` and zeros (float32, whole numbers) whose codes cover ``low`` to ``high`` and 0."""
    first, last = format.code_range
    if format.symmetric:
        return _rounded_up(_divided(torch.maximum(-low, high), last), dtype), None
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = _rounded_up(_divided(high - low, last - first), dtype)
    return scales, _in_steps(-low, scales).round().clamp(first, last)


def encode(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, format: QuantFormat) -> torch.Tensor:
    """Return the nearest codes of groups [rows, groups, columns of a group], unpacked, in the same shape.

    Whole numbers are in float32; 0 is the middle of a symmetric format.
    """
    first, last = format.code_range
    steps = _in_steps(groups, scales.unsqueeze(-1))
    if format.is_float:
        return steps.clamp(first, last).to(torch.float8_e4m3fn)
    if zeros is not None:
        steps = steps + zeros.unsqueeze(-1)
    return steps.round_().clamp_(first, last)


def decode(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Return the values (float32) of codes from `encode`."""
    values = codes.float()
    if zeros is not None:
        values = values - zeros.float().unsqueeze(-1)
    return values * scales.float().unsqueeze(-1)


def _grouped(matrix: torch.Tensor, rows: slice, target: QuantizedMatrix) -> torch.Tensor:
    """Return rows in float32, [rows, groups, columns of a group]."""
    values = matrix[rows].float()
    if target.column_scales is not None:
        values = values / target.column_scales.float()
    return values.reshape(values.shape[0], target.format.num_groups(target.columns), -1)


def _shared(bound: torch.Tensor, target: QuantizedMatrix, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Reduce the bound over rows that share their scales, and return it for each row."""
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
    """Pack codes 0 to 15 [rows, columns] (uint8), two a byte: [rows, ceil(columns / 2)], the first in the low half.

    ``in_fragments``: in fragment order; rows must form whole blocks.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes_in_fragments(packed) if in_fragments else packed


def _in_steps(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide values by their scales; a group of zeros has scale 0. The inverse of a scale may be infinite."""
    steps = scales.float()
    return values / torch.where(steps > 0, steps, 1)


def _divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """Divide values by a number, alike on every device: on a GPU torch multiplies with a Python number's inverse."""
    return values / torch.full_like(values, number)


def _rounded_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round non-negative float32 numbers up to ``dtype``."""
    rounded = scales.to(dtype)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]  # the next larger float has the next bit pattern
    return torch.where(rounded.float() < scales, (rounded.view(bits) + 1).view(dtype), rounded)
