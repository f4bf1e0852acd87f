"""FP8 by FP8: products beside the values that the codes stand for, and tensor cores beside the reference."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import DTYPES, HALVES, LARGE, SMALL, Shape, random_input, random_matrix

from zinfer.kernels import fp8_linear as module
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.fp8_linear import fp8_linear, fp8_linear_ref
from zinfer.kernels.quantize_tokens import quantize_tokens_ref
from zinfer.kernels.quantized import QuantFormat

FP8 = QuantFormat(8, is_float=True)
OF_A_TENSOR = QuantFormat(8, is_float=True, group_rows=None, in_grid=True, scale_dtype="float32")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "format", [FP8, OF_A_TENSOR, replace(OF_A_TENSOR, group_rows=16, scale_dtype="bfloat16")], ids=str
)
@pytest.mark.parametrize("shape", [*SMALL, Shape(70, 40, 77)], ids=str)
def test_the_price_is_the_rounding_of_the_activations(
    dtype: torch.dtype, format: QuantFormat, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "_MOST_WIDENED", 3 * shape.columns)  # several parts
    matrix = random_matrix(format, shape.rows, shape.columns, dtype, "cpu")
    x, bias = random_input(shape, dtype, "cpu")
    codes, scales = quantize_tokens_ref(x, torch.float8_e4m3fn)
    rounded = codes.float().double() * scales.double().unsqueeze(1)
    values = dequantize_ref(matrix, torch.float64)
    for given_bias in (bias, None):
        added = 0 if given_bias is None else given_bias.double()
        wanted, found = rounded @ values.T + added, fp8_linear(x, matrix, given_bias)
        place = torch.finfo(dtype).eps
        scale = (rounded.abs() @ values.abs().T).max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(found.double(), wanted, rtol=place, atol=scale * 1e-6)
    full = x.double() @ values.T
    if full.numel() and full.norm():
        assert (rounded @ values.T - full).norm() / full.norm() < 0.06


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", [FP8, OF_A_TENSOR], ids=str)
@pytest.mark.parametrize("shape", [*LARGE, Shape(1, 1024, 7168), Shape(4096, 7168, 1024), Shape(9, 50257, 64)], ids=str)
def test_tensor_cores_compute_what_the_reference_does(dtype: torch.dtype, format: QuantFormat, shape: Shape) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, shape.rows, shape.columns, dtype, "cuda")
    x, bias = random_input(shape, dtype, "cuda")
    for given_bias in (bias, None):
        wanted, found = fp8_linear_ref(x, matrix, given_bias), fp8_linear(x, matrix, given_bias)
        assert (found - wanted).float().norm() <= 0.006 * wanted.float().norm(), "as exact as bfloat16"


def test_what_is_not_finite_stays_so() -> None:
    matrix = random_matrix(FP8, 9, 64, torch.float16, "cpu")
    x, _ = random_input(Shape(3, 9, 64), torch.float16, "cpu")
    x[1, 5] = float("inf")
    assert fp8_linear(x, matrix).isfinite().all(dim=1).tolist() == [True, False, True]


def test_leading_dimensions_and_no_tokens() -> None:
    matrix = random_matrix(FP8, 9, 64, torch.float16, "cpu")
    x = torch.randn(2, 3, 65, dtype=torch.float16)[..., 1:]
    assert torch.equal(fp8_linear(x, matrix)[1, 2], fp8_linear(x[1, 2:], matrix)[0])
    assert fp8_linear(x[:, :0], matrix).shape == (2, 0, 9)


@pytest.mark.parametrize("format", [QuantFormat(8), QuantFormat(8, is_float=True, group_size=32)], ids=str)
def test_other_formats_are_refused(format: QuantFormat) -> None:
    matrix = random_matrix(format, 4, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match="need FP8 weights with one scale a row"):
        fp8_linear(torch.zeros(1, 64, dtype=torch.float16), matrix)
