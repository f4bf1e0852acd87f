"""Multiplies activations, quantized to e4m3, with an e4m3 matrix (Micikevicius et al. 2022, "FP8 formats").

Each token's activations are scaled to the range of e4m3, with their own scale. FP8 tensor cores, through torch's
library products, multiply codes exactly and add them less exactly than float32; both scales are applied to the sums.
Nearly all of the error is that of rounding activations to four significant bits.
"""

from typing import Final

import torch

from zinfer.kernels.dequantize import scales_of
from zinfer.kernels.quantize_tokens import quantize_tokens_kernel, quantize_tokens_ref
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.quantized_linear import check_input, with_plain_matrix

_MULTIPLE: Final = 16  # of rows and columns, for the library
_LEAST_CAPABILITY: Final = (8, 9)
_MOST_WIDENED: Final = 2**24  # codes of a matrix that are widened at a time


def fp8_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with x quantized token by token and the values of ``matrix`` for W.

    On the CPU, on GPUs without FP8 tensor cores and for rows or columns that are no multiple of 16 it is
    `fp8_linear_ref`, which is slow.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        matrix: e4m3 with one scale a row, its own or one that rows share.
        bias: [rows].

    Returns:
        [..., rows] in the dtype of x; from tensor cores at most as exact as bfloat16.

    Raises:
        ValueError: x does not fit the matrix, or the matrix has another format.
    """
    check_input(x, matrix)
    if not matrix.format.multiplies_fp8:
        raise ValueError(f"FP8 products need FP8 weights with one scale a row, not {matrix.format}")
    x, matrix = with_plain_matrix(x, matrix)
    return (_by_tensor_cores if _fits_tensor_cores(x, matrix) else fp8_linear_ref)(x, matrix, bias)


def fp8_linear_ref(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `fp8_linear`, with float32 sums of some rows of the matrix at a time."""
    flat = x.reshape(-1, matrix.columns)
    codes, scales = quantize_tokens_ref(flat, torch.float8_e4m3fn)
    widened = codes.float()
    values = torch.empty(flat.shape[0], matrix.rows, dtype=torch.float32, device=x.device)
    count = max(_MOST_WIDENED // max(matrix.columns, 1), 1)
    for begin in range(0, matrix.rows, count):
        part = slice(begin, begin + count)
        values[:, part] = widened @ matrix.codes[part].float().T
    values.mul_(scales.unsqueeze(1)).mul_(scales_of(matrix).T)
    values = values if bias is None else values.add_(bias.float())
    return values.to(x.dtype).view(*x.shape[:-1], matrix.rows)


def _fits_tensor_cores(x: torch.Tensor, matrix: QuantizedMatrix) -> bool:
    return (
        x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY
        and matrix.rows % _MULTIPLE == matrix.columns % _MULTIPLE == matrix.codes.data_ptr() % _MULTIPLE == 0
        and x.numel() > 0
        and matrix.rows > 0
    )


def _by_tensor_cores(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    codes, scales = quantize_tokens_kernel(x.reshape(-1, matrix.columns), torch.float8_e4m3fn)
    # With a scale for each token and row the library writes bfloat16 alone, and takes no bias beside few tokens.
    found = torch._scaled_mm(
        codes,
        matrix.codes.contiguous().t(),
        scale_a=scales.unsqueeze(1),
        scale_b=scales_of(matrix).contiguous().t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(x.dtype)
    if bias is not None:
        found += bias
    return found.view(*x.shape[:-1], matrix.rows)
