"""Scales of columns: products follow the definition; the search never costs accuracy, and gains if columns differ."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DTYPES, HALVES, Shape, random_input, random_matrix
from torch.nn import functional

from zinfer.kernels.dequantize import dequantize, dequantize_kernel, dequantize_ref
from zinfer.kernels.int8_linear import int8_linear
from zinfer.kernels.quantize import CannotQuantize, quantize
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.kernels.quantized_linear import quantized_linear
from zinfer.kernels.scaling import scale_columns_into, weighted_error

FORMATS = (
    QuantFormat(8, scales_columns=True),
    QuantFormat(8, 32, symmetric=False, scales_columns=True),
    QuantFormat(4, 32, scales_columns=True),
    QuantFormat(4, 96, symmetric=False, scales_columns=True),
    QuantFormat(8, is_float=True, scales_columns=True),
)


def scaled_matrix(format: QuantFormat, rows: int, columns: int, dtype: torch.dtype, device: str) -> QuantizedMatrix:
    matrix = random_matrix(format, rows, columns, dtype, device)
    assert matrix.column_scales is not None
    matrix.column_scales.copy_(torch.randn(columns, device=device).exp())
    return matrix


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_multiplied_by_their_columns_scales(
    kernel_device: str, format: QuantFormat, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    matrix = scaled_matrix(format, 33, 480, dtype, kernel_device)
    assert matrix.column_scales is not None
    bare = dequantize_ref(matrix.plain)
    assert torch.equal(dequantize_ref(matrix), bare * matrix.column_scales)
    by_kernel = dequantize_kernel(matrix.plain)
    assert torch.equal(dequantize_kernel(matrix), by_kernel * matrix.column_scales)
    assert torch.equal(dequantize(matrix.part(slice(3, 20))), dequantize_ref(matrix)[3:20])
    assert matrix.nbytes == matrix.plain.nbytes + 480 * dtype.itemsize


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_scale_what_they_multiply_with(device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = scaled_matrix(format, 40, 480, dtype, device)
    assert matrix.column_scales is not None
    x, bias = random_input(Shape(6, 40, 480), dtype, device)
    found = quantized_linear(x, matrix, bias)
    assert torch.equal(found, quantized_linear(x * matrix.column_scales, matrix.plain, bias))
    wanted = functional.linear(x.double(), dequantize_ref(matrix, torch.float64), bias.double())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps
    if format == FORMATS[0]:
        found = int8_linear(x, matrix, bias)
        assert torch.equal(found, int8_linear(x * matrix.column_scales, matrix.plain, bias))


@given(
    format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 3),
    dtype=st.sampled_from(DTYPES),
    unused=st.integers(0, 96),
)
def test_the_search_never_costs_accuracy(
    format: QuantFormat, seed: int, spread: float, dtype: torch.dtype, unused: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(20, 96, generator=generator).to(dtype)
    squares = (torch.randn(96, generator=generator) * spread).exp()
    squares[:unused] = 0
    target = QuantizedMatrix.empty(format, 20, 96, dtype, "cpu")
    scale_columns_into(target, matrix, squares)
    assert target.column_scales is not None
    assert bool((target.column_scales > 0).all())
    plain = quantize(matrix, QuantFormat(format.bits, format.group_size, format.symmetric, format.is_float))
    assert weighted_error(target, matrix, squares) <= weighted_error(plain, matrix, squares) * (1 + 1e-5)


@pytest.mark.parametrize(("format", "most_share"), [(FORMATS[0], 0.8), (FORMATS[2], 0.75)], ids=str)
def test_columns_with_large_activations_come_out_more_exact(format: QuantFormat, most_share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 480, generator=generator)
    x = torch.randn(500, 480, generator=generator) * torch.randn(480, generator=generator).exp()
    target = QuantizedMatrix.empty(format, 64, 480, torch.float32, "cpu")
    scale_columns_into(target, matrix, x.square().mean(0))
    plain = quantize(matrix, QuantFormat(format.bits, format.group_size))
    wanted = x @ matrix.T
    scaled, unscaled = (float((quantized_linear(x, m) - wanted).square().sum()) for m in (target, plain))
    assert scaled < most_share * unscaled


def test_scales_that_a_dtype_does_not_reach_are_not_chosen() -> None:
    """What is divided by small scales grows, here beyond what a scale of float16 covers."""
    matrix = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).half()
    matrix[0, 0] = 6000
    squares = torch.full((64,), 1e-8)
    squares[:2] = 1
    target = QuantizedMatrix.empty(FORMATS[2], 4, 64, torch.float16, "cpu")
    scale_columns_into(target, matrix, squares)
    assert bool(torch.isfinite(dequantize_ref(target)).all())
    plain = quantize(matrix, QuantFormat(4, 32))
    assert weighted_error(target, matrix, squares) <= weighted_error(plain, matrix, squares) * (1 + 1e-5)


def test_activations_that_are_not_finite_are_refused() -> None:
    target = QuantizedMatrix.empty(FORMATS[0], 4, 96, torch.float32, "cpu")
    with pytest.raises(CannotQuantize, match="activations of the calibration are not finite"):
        scale_columns_into(target, torch.ones(4, 96), torch.full((96,), float("inf")))
