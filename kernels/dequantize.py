"""Dequantizes a matrix, so that any product can use it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import on_device
from zinfer.kernels.marlin_layout import in_rows
from zinfer.kernels.quantized import FLOAT4_MAGNITUDES, FRAGMENT_ROWS, SYMMETRIC_INT4_ZERO, QuantizedMatrix
from zinfer.kernels.widening import widen_bytes, widen_nibbles

_SLICE_ELEMENTS: Final = 4 << 20  # 16 MiB in float32; the reference holds at most four slices at a time
_TILE_ELEMENTS: Final = 4096
_WARPS: Final = 4


def dequantize(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return a matrix's values, [rows, columns] in its own dtype; the CPU computes a slice of rows at a time."""
    if has_kernels(matrix):
        return dequantize_kernel(matrix)
    out = _empty(matrix)
    for rows in matrix.slices(_SLICE_ELEMENTS):
        out[rows] = dequantize_ref(matrix.part(rows))
    return out


def dequantize_kernel(matrix: QuantizedMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `dequantize`, by the Triton kernel: of a matrix on a GPU, or on the CPU under Triton's interpreter.

    Args:
        out: filled and returned; contiguous, of the matrix's shape, dtype and device.
    """
    out = _empty(matrix) if out is None else out
    assert out.is_contiguous()
    if matrix.column_order is not None:
        return _in_order(dequantize_kernel(replace(matrix, column_order=None)), matrix.column_order, out)
    if matrix.format.in_fragments:
        _dequantize_fragments(matrix, out)
    else:
        _dequantize_rows(matrix, out)
    return out if matrix.column_scales is None else out.mul_(matrix.column_scales)


def _dequantize_rows(matrix: QuantizedMatrix, out: torch.Tensor) -> None:
    four_bits, groups = matrix.format.bits == 4, matrix.scales.shape[1]
    length = matrix.columns // groups
    assert not four_bits or groups == 1 or length % 2 == 0
    lines, line_bytes = matrix.rows * groups, -(-length // 2) if four_bits else length
    block_columns = max(16, min(1024, triton.next_power_of_2(length)))
    block_lines = _TILE_ELEMENTS // block_columns
    grid = (triton.cdiv(lines, block_lines), triton.cdiv(length, block_columns))
    if lines == 0 or length == 0:
        return
    with on_device(out):
        _dequantize_kernel[grid](
            *kernel_parts(matrix),
            out,
            lines,
            length,
            line_bytes,
            FOUR_BITS=four_bits,
            IS_FLOAT=matrix.format.is_float,
            BLOCK_LINES=block_lines,
            BLOCK_COLUMNS=block_columns,
            num_warps=_WARPS,
        )


def _dequantize_fragments(matrix: QuantizedMatrix, out: torch.Tensor) -> None:
    assert matrix.codes.is_contiguous()
    assert matrix.scales.is_contiguous()
    blocks, steps = matrix.rows // FRAGMENT_ROWS, matrix.columns // 64
    if blocks * steps:
        with on_device(out):
            _fragments_kernel[blocks, steps](
                matrix.codes.view(torch.int32),
                matrix.scales,
                out,
                matrix.columns,
                matrix.scales.shape[1],
                STEPS_PER_GROUP=matrix.columns // matrix.scales.shape[1] // 64,
                num_warps=_WARPS,
            )


def dequantize_ref(matrix: QuantizedMatrix, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `dequantize`, in plain torch; computed in float32 and rounded to ``dtype``, and once more by column scales."""
    matrix = in_rows(matrix)
    values, size = codes_of(matrix).float(), matrix.format.group_size or matrix.columns
    if matrix.zeros is not None:
        _in_groups(torch.Tensor.sub_, values, matrix.zeros.float(), size)
    _in_groups(torch.Tensor.mul_, values, scales_of(matrix), size)
    values = values.to(dtype or matrix.dtype)
    if matrix.column_scales is not None:
        values.mul_(matrix.column_scales)
    return values if matrix.column_order is None else _in_order(values, matrix.column_order, torch.empty_like(values))


def scales_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return the scale of each row's groups of a matrix in row order, both levels in one: [rows, groups] float32."""
    format, scales = matrix.format, matrix.scales.float()
    if format.in_grid:
        scales = _repeated(scales, format.group_rows, matrix.rows)
    if matrix.outer_scales is not None:
        outer = _repeated(matrix.outer_scales, format.outer_rows, matrix.rows).unsqueeze(1)
        scales = scales * outer if format.outer == "times" else scales / outer
    return scales


def _repeated(scales: torch.Tensor, band: int | None, rows: int) -> torch.Tensor:
    """Return for each row the scales that ``band`` neighbouring rows share; None: all rows do."""
    return scales.repeat_interleave(rows if band is None else band, dim=0)[:rows]


def _in_groups(change: Callable[..., torch.Tensor], values: torch.Tensor, numbers: torch.Tensor, size: int) -> None:
    """Change values [rows, columns] in place by the number of their group [rows, groups]; the last may be smaller."""
    whole = values.shape[1] // size if size else 0
    change(values[:, : whole * size].view(len(values), whole, size), numbers[:, :whole].unsqueeze(-1))
    change(values[:, whole * size :], numbers[:, whole:])


def _in_order(values: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.index_copy_(1, order.long(), values)


def codes_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return unpacked codes in stored order [rows, columns]: 8 bits unchanged, 4 bits as int8, about 0 if symmetric.

    Those of e2m1 are float32 values.
    """
    if matrix.format.bits == 8:
        return matrix.codes
    packed = in_rows(matrix).codes
    if matrix.format.is_float:
        pairs = _float4_pairs(packed.device)[packed.int()]
        return pairs.flatten(1)[:, : matrix.columns]
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1).view(matrix.rows, -1)[:, : matrix.columns]
    codes = pairs.to(torch.int8)
    return codes - SYMMETRIC_INT4_ZERO if matrix.format.symmetric else codes


@cache
def _float4_pairs(device: torch.device) -> torch.Tensor:
    """Return the two values of each byte of e2m1 codes, the low half's first: [256, 2] float32."""
    magnitudes = torch.tensor(FLOAT4_MAGNITUDES, device=device)
    values, byte = torch.cat([magnitudes, -magnitudes]), torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)


def has_kernels(matrix: QuantizedMatrix) -> bool:
    """Return whether Triton compiles for the device and the format; e4m3 needs compute capability 8.9.

    Groups with an odd number of 4-bit codes, where a byte holds codes of two groups, are left to torch.
    """
    format, device = matrix.format, matrix.codes.device
    if format.in_grid or format.outer is not None or format.scale_dtype is not None:
        return False
    if device.type != "cuda" or (format.bits == 4 and (format.group_size or 0) % 2):
        return False
    return not format.is_float or torch.cuda.get_device_capability(device) >= (8, 9)


def kernel_parts(matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes, scales and zeros for a kernel: e4m3 as bits, since a masked load needs a zero of the dtype."""
    codes = matrix.codes.contiguous()
    zeros = None if matrix.zeros is None else matrix.zeros.contiguous()
    return codes.view(torch.uint8) if matrix.format.is_float else codes, matrix.scales.contiguous(), zeros


def _empty(matrix: QuantizedMatrix) -> torch.Tensor:
    return torch.empty(matrix.rows, matrix.columns, dtype=matrix.dtype, device=matrix.codes.device)


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, num_lines, length, line_bytes,
    FOUR_BITS: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK_LINES: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantize lines: the elements of one scale, contiguous in both codes and values."""
    lines = tl.program_id(0).to(tl.int64) * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
    in_lines = (lines < num_lines)[:, None]
    begin = tl.program_id(1) * BLOCK_COLUMNS
    columns = begin + tl.arange(0, BLOCK_COLUMNS)
    scale = tl.load(scales_ptr + lines, mask=lines < num_lines, other=0).to(tl.float32)[:, None]
    zero = tl.full((BLOCK_LINES, 1), 0, tl.float32)
    if zeros_ptr is not None:
        centre: tl.constexpr = 8 if FOUR_BITS else 128
        zero = tl.load(zeros_ptr + lines, mask=lines < num_lines, other=0).to(tl.float32)[:, None] - centre
    mask = in_lines & (columns < length)[None, :]
    if FOUR_BITS:
        places = begin // 2 + tl.arange(0, BLOCK_COLUMNS // 2)
        in_bytes = in_lines & (places < line_bytes)[None, :]
        pairs = tl.load(codes_ptr + lines[:, None] * line_bytes + places[None, :], mask=in_bytes, other=0)
        low, high = widen_nibbles(pairs, False)
        low = ((low.to(tl.float32) - zero) * scale).to(out_ptr.dtype.element_ty)
        high = ((high.to(tl.float32) - zero) * scale).to(out_ptr.dtype.element_ty)
        values = tl.interleave(low, high)
    else:
        codes = tl.load(codes_ptr + lines[:, None] * line_bytes + columns[None, :], mask=mask, other=0)
        values = (widen_bytes(codes, False, IS_FLOAT).to(tl.float32) - zero) * scale
    tl.store(out_ptr + lines[:, None] * length + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fragments_kernel(  # type: ignore[no-untyped-def]
    words_ptr, scales_ptr, out_ptr, columns, groups, STEPS_PER_GROUP: tl.constexpr
):
    """Dequantize 64 rows and 64 columns in the order of fragments, in words of 4 columns of two rows."""
    block, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, 32)[:, None]  # tile and g
    quad = tl.arange(0, 16)[None, :]  # of columns: l, t, m
    word_ptrs = words_ptr + (block * (columns // 64) + step) * 512 + row * 16
    words = tl.load(word_ptrs + quad // 2 % 4 * 4 + quad // 8 * 2 + quad % 2)
    scale_ptrs = scales_ptr + (block * groups + step // STEPS_PER_GROUP) * 64 + row % 8 * 8 + row // 8 * 2
    place = tl.arange(0, 64)[None, :]
    out_ptrs = out_ptr + (block * 64 + row // 8 * 16 + row % 8) * columns + step * 64 + place
    for half in tl.static_range(2):
        even = tl.interleave(words >> 4 * half & 15, words >> 8 + 4 * half & 15)
        odd = tl.interleave(words >> 16 + 4 * half & 15, words >> 24 + 4 * half & 15)
        values = (tl.interleave(even, odd) - 8).to(tl.float32) * tl.load(scale_ptrs + half).to(tl.float32)
        tl.store(out_ptrs + half * 8 * columns, values.to(out_ptr.dtype.element_ty))
