"""Multiplies activations, quantized to INT8, with an INT8 matrix: W8A8 (Yao et al. 2022, "ZeroQuant").

Each token's activations are quantized symmetrically, with their own scale; tensor cores multiply codes exactly into
32-bit integers, to which both scales and the bias are applied. The only error is the rounding of activations.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from zinfer.kernels.launching import on_device
from zinfer.kernels.quantize_tokens import quantize_tokens_kernel, quantize_tokens_ref
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.quantized_linear import check_input, with_plain_matrix
from zinfer.kernels.tiles import Tiles

_LAST: Final = 127  # the largest code
_MOST_COLUMNS: Final = (2**31 - 1) // _LAST**2  # more of them might overflow a sum
_EXACT_COLUMNS: Final = 2**24 // _LAST**2  # up to this many products of codes add up exactly in float32


@dataclass(frozen=True)
class Int8Tiles(Tiles):
    """A program's share of the product; ``swizzle`` token tiles step through the rows together."""

    swizzle: int = 8


# The best of `benchmarks/kernels.py --tune` on an H200; 128 x 128 with 4 warps and 3 stages is as good, within 3 %.
CHOSEN: Final = Int8Tiles(128, 256, 128, 8, 4)
_PLAIN: Final = Int8Tiles(64, 64, 64, 4, 2)  # without descriptors, rows may begin at any byte


def int8_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with x quantized token by token and the values of ``matrix`` for W.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        matrix: symmetric INT8 with one scale a row.
        bias: [rows].

    Returns:
        [..., rows] in the dtype of x; on the CPU by `int8_linear_ref`.

    Raises:
        ValueError: x does not fit the matrix, or the matrix has another format.
    """
    check_input(x, matrix)
    if not matrix.format.multiplies_int8:
        raise ValueError(f"INT8 products need symmetric INT8 weights with one scale a row, not {matrix.format}")
    if matrix.columns > _MOST_COLUMNS:
        raise ValueError(
            f"INT8 products take at most {_MOST_COLUMNS} columns, not {matrix.columns}: sums would overflow"
        )
    x, matrix = with_plain_matrix(x, matrix)
    multiply = int8_linear_kernel if x.device.type == "cuda" else int8_linear_ref
    return multiply(x, matrix, bias)


def int8_linear_ref(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `int8_linear` in plain torch: exact sums, from float32 products that are too short to round."""
    codes, scales = quantize_tokens_ref(x.reshape(-1, matrix.columns), torch.int8)
    sums = torch.zeros(codes.shape[0], matrix.rows, dtype=torch.int32, device=x.device)
    for begin in range(0, matrix.columns, _EXACT_COLUMNS):
        part = slice(begin, begin + _EXACT_COLUMNS)
        sums += (codes[:, part].float() @ matrix.codes[:, part].float().T).to(torch.int32)
    values = sums.float().mul_(scales.unsqueeze(1)).mul_(matrix.scales.float().T)
    values = values if bias is None else values.add_(bias.float())
    return values.to(x.dtype).view(*x.shape[:-1], matrix.rows)


def int8_linear_kernel(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None, tiles: Int8Tiles = CHOSEN
) -> torch.Tensor:
    """As `int8_linear`, by the Triton kernels: on a GPU, or on the CPU under Triton's interpreter."""
    flat, rows, columns = x.reshape(-1, matrix.columns), matrix.rows, matrix.columns
    tokens = flat.shape[0]
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if out.numel() == 0 or columns == 0:
        return int8_linear_ref(x, matrix, bias)
    codes, scales = quantize_tokens_kernel(flat, torch.int8)
    left, right = codes, matrix.codes.contiguous()
    # The tensor memory accelerator copies tiles by descriptors, from compute capability 9.0 on.
    has_descriptors = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0)
    by_descriptor = has_descriptors and columns % 16 == right.data_ptr() % 16 == 0
    if not by_descriptor:
        tiles = _PLAIN
    else:
        left = TensorDescriptor.from_tensor(left, [tiles.block_tokens, tiles.block_columns])
        right = TensorDescriptor.from_tensor(right, [tiles.block_rows, tiles.block_columns])
    with on_device(x):
        _int8_kernel[(triton.cdiv(tokens, tiles.block_tokens) * triton.cdiv(rows, tiles.block_rows),)](
            left,
            right,
            scales,
            matrix.scales.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            tokens,
            rows,
            columns,
            BY_DESCRIPTOR=by_descriptor,
            EVEN=columns % tiles.block_columns == 0,
            SWIZZLE=tiles.swizzle,
            BLOCK=tiles.block_columns,
            **tiles.options,
        )
    return out.view(*x.shape[:-1], rows)


@triton.jit
def _int8_kernel(  # type: ignore[no-untyped-def]
    x, weights, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, tokens, rows, columns,
    BY_DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, SWIZZLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute [tokens, rows]; SWIZZLE token tiles step through rows together and share them in the L2 cache."""
    token_tiles = tl.cdiv(tokens, BLOCK_TOKENS)
    group_tiles = SWIZZLE * tl.cdiv(rows, BLOCK_ROWS)
    first = tl.program_id(0) // group_tiles * SWIZZLE
    height = tl.minimum(token_tiles - first, SWIZZLE)
    token_begin = (first + tl.program_id(0) % group_tiles % height) * BLOCK_TOKENS
    row_begin = tl.program_id(0) % group_tiles // height * BLOCK_ROWS
    token = token_begin + tl.arange(0, BLOCK_TOKENS)
    row = row_begin + tl.arange(0, BLOCK_ROWS)
    place = tl.arange(0, BLOCK)
    if not BY_DESCRIPTOR:
        x_ptrs = x + tl.minimum(token, tokens - 1)[:, None].to(tl.int64) * columns + place[None, :]
        weights_ptrs = weights + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * columns + place[None, :]
    sums = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.int32)
    for begin in range(0, columns, BLOCK):
        if BY_DESCRIPTOR:
            left = x.load([token_begin, begin])
            right = weights.load([row_begin, begin])
        elif EVEN:
            left = tl.load(x_ptrs + begin)
            right = tl.load(weights_ptrs + begin)
        else:
            inside = (place < columns - begin)[None, :]
            left = tl.load(x_ptrs + begin, mask=inside, other=0)
            right = tl.load(weights_ptrs + begin, mask=inside, other=0)
        sums = tl.dot(left, tl.trans(right), sums, out_dtype=tl.int32)
    in_tokens, in_rows = token < tokens, row < rows
    values = sums.to(tl.float32) * tl.load(x_scales_ptr + token, mask=in_tokens, other=0)[:, None]
    values *= tl.load(scales_ptr + row, mask=in_rows, other=0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        values += tl.load(bias_ptr + row, mask=in_rows, other=0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + token[:, None].to(tl.int64) * rows + row[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=in_tokens[:, None] & in_rows[None, :])
