"""Multiplies activations with a quantized matrix: `torch.nn.functional.linear` for a `QuantizedMatrix`.

Few tokens: one kernel that reads the packed bytes, chosen by their order. Many tokens: the matrix is dequantized to
rounded elements, for the vendor's product.
"""

from typing import Final

import torch
from torch.nn import functional

from zinfer.kernels.dequantize import dequantize, has_kernels
from zinfer.kernels.fragment_linear import can_multiply, fragment_linear
from zinfer.kernels.fused_linear import can_fuse, fused_linear
from zinfer.kernels.quantized import MOST_FUSED_TOKENS, QuantizedMatrix
from zinfer.kernels.scaled_linear import can_scale, scaled_linear

MOST_FRAGMENT_TOKENS: Final = 96
"""The most tokens for the kernel in fragment order: six tiles of 16, which take less time than dequantizing."""


def quantized_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32 on a GPU.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        bias: [rows].

    Returns:
        [..., rows] in the dtype of x.

    Raises:
        ValueError: x does not fit the matrix.
    """
    check_input(x, matrix)
    x, matrix = with_plain_matrix(x, matrix)
    tokens = x.numel() // max(matrix.columns, 1)
    if is_fused(matrix, tokens):
        if matrix.format.in_fragments:
            return fragment_linear(x, matrix, bias)
        return scaled_linear(x, matrix, bias) if can_scale(matrix) else fused_linear(x, matrix, bias)
    return functional.linear(x, dequantize(matrix), bias)


def is_fused(matrix: QuantizedMatrix, tokens: int) -> bool:
    """Return whether this many tokens are multiplied with the codes, without dequantizing the matrix."""
    if matrix.format.in_fragments:
        return tokens <= MOST_FRAGMENT_TOKENS and can_multiply(matrix)
    return tokens <= MOST_FUSED_TOKENS and has_kernels(matrix) and (can_scale(matrix) or can_fuse(matrix))


def with_plain_matrix(x: torch.Tensor, matrix: QuantizedMatrix) -> tuple[torch.Tensor, QuantizedMatrix]:
    """Return x [..., columns], ordered and scaled, and a plain matrix with the same product."""
    if matrix.column_order is not None:
        x = x.index_select(-1, matrix.column_order)
    if matrix.column_scales is not None:
        x = x * matrix.column_scales
    return x, matrix.plain


def check_input(x: torch.Tensor, matrix: QuantizedMatrix) -> None:
    """Raise ValueError unless x [..., columns] fits the matrix."""
    if x.shape[-1:] != (matrix.columns,):
        raise ValueError(
            f"x has shape {tuple(x.shape)}; its last dimension must be the matrix's {matrix.columns} columns"
        )
    if (x.dtype, x.device) != (matrix.dtype, matrix.codes.device):
        raise ValueError(
            f"x is {x.dtype} on {x.device}, the matrix {matrix.dtype} on {matrix.codes.device}; "
            "cast or move one of them"
        )
