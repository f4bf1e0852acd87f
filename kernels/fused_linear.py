"""Multiplies few tokens with a quantized matrix in one kernel, which reads only the packed bytes.

The kernel reads codes, widens them in registers and multiplies the unscaled codes, which are exact whole numbers; the
sum over each group is scaled. Sums are added in a fixed order, without atomics: the same arguments give the same bits.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from zinfer.kernels.dequantize import kernel_parts, scale_kind
from zinfer.kernels.launching import device_function, dot, on_device
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.tiles import Cut, FusedTiles, most_columns, tiles_for
from zinfer.kernels.widening import scale_values, widen_bytes, widen_nibbles

_LEAST_BLOCK: Final = 16  # columns of one tensor core instruction
_REDUCE_BLOCK: Final = 1024


def can_fuse(matrix: QuantizedMatrix) -> bool:
    """Return whether the kernel supports the matrix: half precision, one group per row or groups that steps divide.

    Codes are whole numbers or e4m3, scales of any type, of rows or of blocks in a grid.
    """
    assert not matrix.format.in_fragments, "`fragment_linear` has a kernel of its own"
    return (
        matrix.dtype in (torch.float16, torch.bfloat16)
        and matrix.format.outer is None
        and (matrix.format.bits == 8 or not matrix.format.is_float)
        and most_columns(matrix) * matrix.format.bits // 8 >= _LEAST_BLOCK
    )


def fused_linear(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None, tiles: FusedTiles | None = None
) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32.

    Args:
        x: [..., columns], of the matrix's dtype and device: a GPU, or the CPU under Triton's interpreter.
        matrix: `can_fuse` is true for it.
        bias: [rows].
        tiles: to use instead of the table's.
    """
    assert can_fuse(matrix)
    assert matrix.column_scales is matrix.column_order is None, "x is to be scaled and ordered"
    flat = x.reshape(-1, matrix.columns).contiguous()
    out = torch.empty((flat.shape[0], matrix.rows), dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    if out.numel() and matrix.columns:
        tiles = tiles or tiles_for(matrix.format.bits, flat.shape[0])
        cut = Cut.of(flat.shape[0], matrix, tiles)
        is_split = cut.num_parts > 1
        sums = torch.empty((cut.num_parts, *out.shape), dtype=torch.float32, device=x.device) if is_split else out
        with on_device(x):
            _fused_kernel[cut.num_tiles, cut.num_parts](
                _pairs(flat) if matrix.format.bits == 4 else flat,
                *kernel_parts(matrix),
                None if is_split else bias,
                sums,
                *out.shape,
                cut.width,
                matrix.scales.shape[1],
                cut.steps,
                FOUR_BITS=matrix.format.bits == 4,
                IS_FLOAT=matrix.format.is_float,
                SCALES=scale_kind(matrix.format),
                GROUP_ROWS=matrix.format.group_rows or 0 if matrix.format.in_grid else 1,
                IS_BFLOAT=x.dtype == torch.bfloat16,
                ONE_GROUP=matrix.scales.shape[1] == 1,
                STEPS_PER_GROUP=cut.steps_per_group,
                EVEN=cut.width % cut.block == 0,
                WEIGHTS_LEFT=tiles.weights_left,
                BLOCK=cut.block,
                UNROLL=tiles.unroll,
                **tiles.options,
            )
        if is_split:
            add_parts(sums, bias, out)
    return out.view(*x.shape[:-1], matrix.rows)


def add_parts(sums: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fill ``out`` [tokens, rows] with the sum of ``sums`` [parts, tokens, rows] (float32), first to last, and bias."""
    with on_device(out):
        _sum_kernel[(triton.cdiv(out.numel(), _REDUCE_BLOCK),)](
            sums, bias, out, out.numel(), out.shape[1], PARTS=len(sums), BLOCK=_REDUCE_BLOCK
        )


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """Return pairs of columns as 32-bit words, the first in the low half; an odd last column is paired with a zero."""
    if x.shape[1] % 2:
        x = functional.pad(x, (0, 1))
    elif x.data_ptr() % 4:
        x = x.clone()
    return x.view(torch.int32)


@device_function
def _accumulate(weights, x, sums, WEIGHTS_LEFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the products of weights [rows, columns] and x [tokens, columns] to sums, [rows, tokens] or transposed."""
    if WEIGHTS_LEFT:
        return dot(weights, tl.trans(x), sums)
    else:
        return dot(x, tl.trans(weights), sums)


@device_function
def _multiply(  # type: ignore[no-untyped-def]
    x, codes, zero, sums,
    IS_BFLOAT: tl.constexpr, FOUR_BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    HAS_ZERO: tl.constexpr, WEIGHTS_LEFT: tl.constexpr,
):  # fmt: skip
    """Add a step's products to sums; with 4 bits, of even and of odd columns, as words of x hold both."""
    TYPE: tl.constexpr = tl.bfloat16 if IS_BFLOAT else tl.float16
    if FOUR_BITS:
        low, high = widen_nibbles(codes, IS_BFLOAT)
        if HAS_ZERO:
            centred = (zero.to(tl.float32) - 8).to(low.dtype)[:, None]
            low, high = low - centred, high - centred
        sums = _accumulate(low, x.to(tl.int16).to(TYPE, bitcast=True), sums, WEIGHTS_LEFT)
        return _accumulate(high, (x >> 16).to(tl.int16).to(TYPE, bitcast=True), sums, WEIGHTS_LEFT)
    else:
        weights = widen_bytes(codes, IS_BFLOAT, IS_FLOAT)
        if HAS_ZERO:
            weights -= (zero.to(tl.float32) - 128).to(weights.dtype)[:, None]
        return _accumulate(weights, x, sums, WEIGHTS_LEFT)


@triton.jit(do_not_specialize=["tokens", "rows", "steps"])
def _fused_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, tokens, rows, width, groups, steps,
    FOUR_BITS: tl.constexpr, IS_FLOAT: tl.constexpr, SCALES: tl.constexpr, GROUP_ROWS: tl.constexpr,
    IS_BFLOAT: tl.constexpr, ONE_GROUP: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr, EVEN: tl.constexpr, WEIGHTS_LEFT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of tokens and rows, summed over some steps; tiles of the same rows run concurrently."""
    HAS_ZERO: tl.constexpr = zeros_ptr is not None
    token_tiles = tl.cdiv(tokens, BLOCK_TOKENS)
    token = tl.program_id(0) % token_tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = tl.program_id(0) // token_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    stored_row = tl.minimum(row, rows - 1).to(tl.int64)
    unit = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + token[:, None].to(tl.int64) * width + unit[None, :]
    codes_ptrs = codes_ptr + stored_row[:, None] * width + unit[None, :]
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(width, BLOCK))
    # The scales of a step are loaded one step ahead, since no asynchronous copy loads them early.
    scale_ptrs = scales_ptr + (stored_row // GROUP_ROWS if GROUP_ROWS else stored_row * 0) * groups
    group = 0 if ONE_GROUP else first // STEPS_PER_GROUP
    scale = tl.load(scale_ptrs + group)
    zero = scale  # of no use without zeros
    if HAS_ZERO:
        zero_ptrs = zeros_ptr + stored_row * groups
        zero = tl.load(zero_ptrs + group)
    if WEIGHTS_LEFT:
        none = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    else:
        none = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
    sums = none
    for step in tl.range(first, last, loop_unroll_factor=UNROLL):
        if EVEN:
            codes = tl.load(codes_ptrs + step * BLOCK)
            x = tl.load(x_ptrs + step * BLOCK, mask=(token < tokens)[:, None], other=0)
        else:
            inside = (unit < width - step * BLOCK)[None, :]
            codes = tl.load(codes_ptrs + step * BLOCK, mask=inside, other=0)
            x = tl.load(x_ptrs + step * BLOCK, mask=(token < tokens)[:, None] & inside, other=0)
        if ONE_GROUP:
            sums = _multiply(x, codes, zero, sums, IS_BFLOAT, FOUR_BITS, IS_FLOAT, HAS_ZERO, WEIGHTS_LEFT)
        else:
            next_group = tl.minimum((step + 1) // STEPS_PER_GROUP, groups - 1)
            next_scale = tl.load(scale_ptrs + next_group)
            next_zero = tl.load(zero_ptrs + next_group) if HAS_ZERO else next_scale
            product = _multiply(x, codes, zero, none, IS_BFLOAT, FOUR_BITS, IS_FLOAT, HAS_ZERO, WEIGHTS_LEFT)
            sums += product * scale_values(scale[:, None] if WEIGHTS_LEFT else scale[None, :], SCALES)
            scale, zero = next_scale, next_zero
    if WEIGHTS_LEFT:
        sums = tl.trans(sums)
    if ONE_GROUP:
        sums *= scale_values(scale[None, :], SCALES)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + stored_row)[None, :].to(tl.float32)
    places = (tl.program_id(1).to(tl.int64) * tokens + token[:, None]) * rows + row[None, :]
    tl.store(
        out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (row < rows)[None, :]
    )


@triton.jit(do_not_specialize=["numel", "rows"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, bias_ptr, out_ptr, numel, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the partial sums of `_fused_kernel`, first to last, and the bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_ptr + part * numel.to(tl.int64) + place, mask=place < numel, other=0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % rows, mask=place < numel, other=0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < numel)
