"""INT8 by INT8: codes and exact sums beside whole numbers, the kernel beside its reference."""

import pytest
import torch
from kernel_cases import DTYPES, HALVES, LARGE, SMALL, Shape, random_input, random_matrix
from kernel_tiles import INT8_CANDIDATES

from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.int8_linear import (
    Int8Tiles,
    int8_linear,
    int8_linear_kernel,
    int8_linear_ref,
)
from zinfer.kernels.quantize_tokens import quantize_tokens_ref
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix

INT8 = QuantFormat(8)
TILES = Int8Tiles(32, 32, 64, 4, 3, 2)


def assert_equals_reference(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """One place off: a GPU multiplies and adds in one rounding, the interpreter cuts bfloat16 off."""
    place = torch.finfo(wanted.dtype).eps
    scale = wanted.float().abs().max().item()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=place, atol=max(scale, 1.0) * 1e-6)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SMALL, Shape(70, 40, 77)], ids=str)
def test_the_kernel_equals_the_reference(kernel_device: str, dtype: torch.dtype, shape: Shape) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(INT8, shape.rows, shape.columns, dtype, kernel_device)
    x, bias = random_input(shape, dtype, kernel_device)
    x[1:2] = 0
    for given_bias in (bias, None):
        found = int8_linear_kernel(x, matrix, given_bias, TILES)
        assert_equals_reference(found, int8_linear_ref(x, matrix, given_bias))
        assert torch.equal(found, int8_linear_kernel(x, matrix, given_bias, TILES))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [*LARGE, Shape(4096, 7168, 1024), Shape(1000, 28672, 7168)], ids=str)
def test_large_products(dtype: torch.dtype, shape: Shape) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(INT8, shape.rows, shape.columns, dtype, "cuda")
    x, bias = random_input(shape, dtype, "cuda")
    wanted = int8_linear_ref(x, matrix, bias)
    assert_equals_reference(int8_linear(x, matrix, bias), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", INT8_CANDIDATES, ids=str)
def test_every_candidate(tiles: Int8Tiles) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(INT8, 1000, 4352, torch.float16, "cuda")
    x, bias = random_input(Shape(333, 1000, 4352), torch.float16, "cuda")
    assert_equals_reference(int8_linear_kernel(x, matrix, bias, tiles), int8_linear_ref(x, matrix, bias))


@pytest.mark.parametrize("columns", [3000, 16])
def test_the_reference_sums_exactly(columns: int) -> None:
    codes = torch.full((2, columns), 127, dtype=torch.int8)
    codes[1, ::2] = -127
    matrix = QuantizedMatrix(INT8, columns, torch.float32, codes, torch.ones(2, 1))
    x = torch.full((1, columns), 127.0)
    assert int8_linear(x, matrix).tolist() == [[127.0**2 * columns, 0]]


def test_the_price_is_the_rounding_of_the_activations() -> None:
    torch.manual_seed(0)
    matrix = random_matrix(INT8, 50, 700, torch.float32, "cpu")
    x, bias = random_input(Shape(9, 50, 700), torch.float32, "cpu")
    codes, scales = quantize_tokens_ref(x, torch.int8)
    rounded = codes.double() * scales.double().unsqueeze(1)
    wanted = rounded @ dequantize_ref(matrix, torch.float64).T + bias.double()
    torch.testing.assert_close(int8_linear(x, matrix, bias).double(), wanted, rtol=1e-5, atol=1e-5)
    full = x.double() @ dequantize_ref(matrix, torch.float64).T + bias.double()
    assert 1e-4 < (wanted - full).norm() / full.norm() < 0.02


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's, of NaN
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(kernel_device: str, value: float) -> None:
    matrix = random_matrix(INT8, 9, 64, torch.float16, kernel_device)
    x, _ = random_input(Shape(3, 9, 64), torch.float16, kernel_device)
    x[1, 5] = value
    for found in (int8_linear_kernel(x, matrix, None, TILES), int8_linear_ref(x, matrix)):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]


def test_leading_dimensions_and_no_tokens(kernel_device: str) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(INT8, 9, 64, torch.float16, kernel_device)
    x = torch.randn(2, 3, 65, dtype=torch.float16, device=kernel_device)[..., 1:]
    assert_equals_reference(int8_linear_kernel(x, matrix, None, TILES), int8_linear_ref(x, matrix))
    assert int8_linear_kernel(x[:, :0], matrix, None, TILES).shape == (2, 0, 9)


@pytest.mark.parametrize(
    "format",
    [QuantFormat(4), QuantFormat(8, symmetric=False), QuantFormat(8, group_size=32), QuantFormat(8, is_float=True)],
    ids=str,
)
def test_other_formats_are_refused(format: QuantFormat) -> None:
    matrix = random_matrix(format, 4, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match="need symmetric INT8 weights with one scale a row"):
        int8_linear(torch.zeros(1, 64, dtype=torch.float16), matrix)


def test_what_does_not_fit_is_refused() -> None:
    matrix = random_matrix(INT8, 4, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match="last dimension must be the matrix's 64 columns"):
        int8_linear(torch.zeros(1, 63, dtype=torch.float16), matrix)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 on cpu, the matrix torch.float16"):
        int8_linear(torch.zeros(1, 64, dtype=torch.bfloat16), matrix)
    endless = QuantizedMatrix.empty(INT8, 1, 133_145, torch.float16, "meta")
    with pytest.raises(ValueError, match="at most 133144 columns"):
        int8_linear(torch.empty(1, 133_145, dtype=torch.float16, device="meta"), endless)
