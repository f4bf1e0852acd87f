"""Multiplies activations with a quantized matrix: `torch.nn.functional.linear` for a `QuantizedMatrix`.

Few tokens: one kernel that reads the packed bytes; which one, the order in which they lie decides. Many tokens: the
matrix is dequantized once, its elements rounded, and the vendor's product does the rest.
"""

from typing import Final

import torch
from torch.nn import functional

from zinfer.kernels.dequantize import dequantize, dequantize_ref, has_kernels
from zinfer.kernels.fragment_linear import can_multiply, fragment_linear
from zinfer.kernels.fused_linear import can_fuse, fused_linear
from zinfer.kernels.quantized import QuantizedMatrix

MOST_FUSED_TOKENS: Final = {4: 128, 8: 128}
"""The most tokens that the fused kernel serves, by bits: 256 were slower on an H200 (benchmarks/kernels.py)."""
MOST_FRAGMENT_TOKENS: Final = 96
"""The most tokens that the kernel for fragments serves: six times its 16, which take less than dequantizing."""


def quantized_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32 on a GPU.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        bias: [rows].

    Returns:
        [..., rows] in the dtype of x.

    Raises:
        ValueError: x or bias do not fit the matrix.
    """
    check_operands(x, matrix, bias)
    x, matrix = with_plain_matrix(x, matrix)
    tokens = x.numel() // max(matrix.columns, 1)
    if is_fused(matrix, tokens):
        return fragment_linear(x, matrix, bias) if matrix.format.in_fragments else fused_linear(x, matrix, bias)
    return functional.linear(x, dequantize(matrix), bias)


def quantized_linear_ref(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `quantized_linear`, with elements and sums in float64, rounded once."""
    product = x.double() @ dequantize_ref(matrix, torch.float64).T
    return (product if bias is None else product + bias.double()).to(x.dtype)


def is_fused(matrix: QuantizedMatrix, tokens: int) -> bool:
    """Whether so many tokens are multiplied with the codes as they lie, and no matrix is dequantized for them."""
    return tokens <= _most_fused_tokens(matrix)


def _most_fused_tokens(matrix: QuantizedMatrix) -> int:
    """The most tokens that are not slower without dequantizing; -1 where no kernel takes the matrix."""
    if matrix.format.in_fragments:
        return MOST_FRAGMENT_TOKENS if can_multiply(matrix) else -1
    return MOST_FUSED_TOKENS[matrix.format.bits] if has_kernels(matrix) and can_fuse(matrix) else -1


def with_plain_matrix(x: torch.Tensor, matrix: QuantizedMatrix) -> tuple[torch.Tensor, QuantizedMatrix]:
    """Operands of the same product whose matrix orders and scales no columns: x [..., columns] has it done."""
    if matrix.column_order is not None:
        x = x.index_select(-1, matrix.column_order)
    if matrix.column_scales is not None:
        x = x * matrix.column_scales
    return x, matrix.plain


def check_operands(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless x [..., columns] and bias [rows] go with the matrix."""
    if x.shape[-1:] != (matrix.columns,):
        raise ValueError(
            f"x has shape {tuple(x.shape)}; its last dimension must be the matrix's {matrix.columns} columns"
        )
    if bias is not None and bias.shape != (matrix.rows,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the matrix {matrix.rows} rows")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (matrix.dtype, matrix.codes.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, the matrix {matrix.dtype} on {matrix.codes.device}; "
                "cast or move one of them"
            )
