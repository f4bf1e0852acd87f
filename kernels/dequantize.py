"""Dequantizes a matrix, so that any product can use it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import INTERPRETED, device_function, on_device
from zinfer.kernels.marlin_layout import in_rows
from zinfer.kernels.quantized import FLOAT4_MAGNITUDES, FRAGMENT_ROWS, SYMMETRIC_INT4_ZERO, QuantFormat, QuantizedMatrix
from zinfer.kernels.widening import factor_of, float4_codes, float8_codes, scale_values

_SLICE_ELEMENTS: Final = 4 << 20  # 16 MiB in float32; the reference holds at most four slices at a time
# Of a program: rows of a step, steps, and units of 8 columns. A warp has a row's 256 columns.
_ROWS: Final = 32 if INTERPRETED else 4
_STEPS: Final = 2 if INTERPRETED else 8
_UNITS: Final = 32
_WARPS: Final = 4
_SUMMAND = tl.constexpr(2.0**23)


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
    if matrix.rows == 0 or matrix.columns == 0:
        return
    format, codes, zeros = matrix.format, matrix.codes.contiguous(), matrix.zeros
    unit = torch.int32 if format.bits == 4 else torch.int64
    is_whole = matrix.columns % 8 == 0 and codes.storage_offset() % unit.itemsize == 0
    tiles = triton.cdiv(matrix.rows, _ROWS * _STEPS) * triton.cdiv(matrix.columns, 8 * _UNITS)
    with on_device(out):
        _dequantize_kernel[(tiles,)](
            codes.view(unit if is_whole else torch.uint8),
            stored_scales(matrix),
            None if zeros is None else zeros.contiguous(),
            matrix.outer_scales,
            out,
            matrix.rows,
            matrix.columns,
            matrix.columns // 8 if is_whole else codes.shape[1],
            matrix.scales.shape[1],
            BITS=format.bits,
            IS_FLOAT=format.is_float,
            IS_SIGNED=codes.dtype == torch.int8,
            SCALES=scale_kind(format),
            GROUP_ROWS=format.group_rows or 0 if format.in_grid else 1,
            GROUP_SIZE=format.group_size or 0,
            OUTER_ROWS=format.outer_rows or 0,
            IS_OVER=format.outer == "over",
            IS_WHOLE=is_whole,
            ROWS=_ROWS,
            STEPS=_STEPS,
            UNITS=_UNITS,
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
    """Return whether Triton compiles for the device."""
    return matrix.codes.device.type == "cuda"


def kernel_parts(matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes, scales and zeros for a kernel: e4m3 as bits, since a masked load needs a zero of the dtype."""
    codes = matrix.codes.contiguous()
    zeros = None if matrix.zeros is None else matrix.zeros.contiguous()
    return codes.view(torch.uint8) if matrix.format.is_float else codes, stored_scales(matrix), zeros


def stored_scales(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return scales for a kernel: those of one byte as bits."""
    scales = matrix.scales.contiguous()
    return scales.view(torch.uint8) if scales.itemsize == 1 else scales


def scale_kind(format: QuantFormat) -> str:
    """Return how a kernel reads scales: as "e8m0", "e4m3", or "float" for numbers of two or more bytes."""
    return {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}.get(format.scale_dtype or "", "float")


def _empty(matrix: QuantizedMatrix) -> torch.Tensor:
    return torch.empty(matrix.rows, matrix.columns, dtype=matrix.dtype, device=matrix.codes.device)


@device_function
def _load_unit(codes_ptr, row, unit, inside, stride, BITS: tl.constexpr, IS_WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load units, the codes of 8 columns, as words of 4 or 8 bytes; or byte by byte where rows are not whole words."""
    line_ptrs = codes_ptr + row.to(tl.int64) * stride
    if IS_WHOLE:
        return tl.load(line_ptrs + unit, mask=inside, other=0)
    else:
        WORD: tl.constexpr = tl.int32 if BITS == 4 else tl.int64
        word = (unit * 0).to(WORD)
        for number in tl.static_range(BITS):
            place = unit * BITS + number
            byte = tl.load(line_ptrs + place, mask=inside & (place < stride), other=0)
            word |= byte.to(WORD) << 8 * number
        return word


@device_function
def _load_scales(  # type: ignore[no-untyped-def]
    scales_ptr, zeros_ptr, outer_ptr, row, column, inside, groups, SCALES: tl.constexpr, GROUP_ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, OUTER_ROWS: tl.constexpr, IS_OVER: tl.constexpr,
):  # fmt: skip
    """Load the scale and, if there are zeros, the zero of each row and column, in float32."""
    band = row // GROUP_ROWS if GROUP_ROWS else row * 0
    place = band.to(tl.int64) * groups + (column // GROUP_SIZE if GROUP_SIZE else 0)
    scale = scale_values(tl.load(scales_ptr + place, mask=inside, other=0), SCALES)
    if outer_ptr is not None:
        outer = tl.load(outer_ptr + (row // OUTER_ROWS if OUTER_ROWS else row * 0))
        scale = tl.div_rn(scale, outer + tl.zeros_like(scale)) if IS_OVER else scale * outer
    zero = scale  # of no use without zeros
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + place, mask=inside, other=0).to(tl.float32)
    return scale, zero


@device_function
def _whole_codes(word, BITS: tl.constexpr, IS_SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert words (int32) of 4 or 8 codes to 2**23 and the code, of a signed one that plus 128, as float32.

    Or-ed into the mantissa of 2**23, a whole number needs no conversion, of which a GPU does few.
    """
    if IS_SIGNED:
        word ^= -0x7F7F7F80
    codes = ()
    for number in tl.static_range(32 // BITS):
        bits = word >> BITS * number & (15 if BITS == 4 else 255)
        codes += ((bits | 0x4B000000).to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    return codes


@device_function
def _codes_of(word, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert the eight codes of units to float32, less a factor or more by a summand."""
    if BITS == 4:
        return float4_codes(word) if IS_FLOAT else _whole_codes(word, BITS, IS_SIGNED)
    else:
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        if IS_FLOAT:
            return float8_codes(low) + float8_codes(high)
        else:
            return _whole_codes(low, BITS, IS_SIGNED) + _whole_codes(high, BITS, IS_SIGNED)


@device_function
def _value_of(code, scale, zero, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the value of a code as `_codes_of` has it."""
    if IS_FLOAT:
        return code * (scale * factor_of(BITS))
    elif HAS_ZERO:
        return (code - (zero + _SUMMAND)) * scale
    else:
        return (code - (_SUMMAND + (8 if BITS == 4 else 128))) * scale


@device_function
def _in_order_of_columns(values):  # type: ignore[no-untyped-def]
    """Join the eight values of units in new dimensions; the last has the lowest bit of the column's number."""
    even = tl.join(tl.join(values[0], values[4]), tl.join(values[2], values[6]))
    return tl.join(even, tl.join(tl.join(values[1], values[5]), tl.join(values[3], values[7])))


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, zeros_ptr, outer_ptr, out_ptr, rows, columns, stride, groups,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, SCALES: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr, OUTER_ROWS: tl.constexpr, IS_OVER: tl.constexpr,
    IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile in steps of some rows, with all codes loaded first; a thread has 8 columns of a step's row.

    So a warp reads and writes neighbouring bytes, and no value changes threads.
    """
    HAS_ZERO: tl.constexpr = zeros_ptr is not None
    IS_SHARED: tl.constexpr = GROUP_SIZE % 8 == 0  # a unit has one scale
    width = stride * 8 if IS_WHOLE else columns  # a multiple of 8 that the compiler knows of
    tiles = tl.cdiv(width, UNITS * 8)
    first = tl.program_id(0) // tiles * (ROWS * STEPS) + tl.arange(0, ROWS)[:, None]
    unit = tl.program_id(0) % tiles * UNITS + tl.arange(0, UNITS)[None, :]
    words, scales = (), ()
    for step in tl.static_range(STEPS):
        row = first + step * ROWS
        inside = (row < rows) & (unit * 8 < width)
        row = tl.minimum(row, rows - 1)
        words += (_load_unit(codes_ptr, row, unit, inside, stride, BITS, IS_WHOLE),)  # type: ignore[assignment]
        if IS_SHARED:
            scales += (_load_scales(  # type: ignore[assignment]
                scales_ptr, zeros_ptr, outer_ptr, row, unit * 8, inside, groups,
                SCALES, GROUP_ROWS, GROUP_SIZE, OUTER_ROWS, IS_OVER,
            ),)  # fmt: skip
    column = tl.program_id(0) % tiles * (UNITS * 8) + tl.arange(0, UNITS * 8)[None, :]
    for step in tl.static_range(STEPS):
        row = first + step * ROWS
        codes = _codes_of(words[step], BITS, IS_FLOAT, IS_SIGNED)
        values = ()
        for k in tl.static_range(8):
            if IS_SHARED:
                scale, zero = scales[step]  # type: ignore[var-annotated]
            else:
                scale, zero = _load_scales(
                    scales_ptr, zeros_ptr, outer_ptr, tl.minimum(row, rows - 1), unit * 8 + k,
                    (row < rows) & (unit * 8 + k < width), groups,
                    SCALES, GROUP_ROWS, GROUP_SIZE, OUTER_ROWS, IS_OVER,
                )  # fmt: skip
            value = _value_of(codes[k], scale, zero, BITS, IS_FLOAT, HAS_ZERO)
            values += (value.to(out_ptr.dtype.element_ty),)  # type: ignore[assignment]
        line = tl.reshape(_in_order_of_columns(values), (ROWS, UNITS * 8))
        tl.store(out_ptr + row.to(tl.int64) * width + column, line, mask=(row < rows) & (column < width))


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
