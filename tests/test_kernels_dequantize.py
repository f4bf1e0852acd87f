"""Quantized matrices back in full: the kernel equals its reference to the bit, the reference the definition."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    FORMATS,
    FRAGMENTS,
    LARGE_CASES,
    SMALL,
    SMALL_FRAGMENTS,
    Shape,
    fits,
    random_matrix,
)

from zinfer.kernels import dequantize as module
from zinfer.kernels.dequantize import dequantize, dequantize_kernel, dequantize_ref
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix


def has_whole_bytes(format: QuantFormat) -> bool:
    """Whether no byte holds codes of two groups."""
    return format.bits == 8 or not (format.group_size or 0) % 2


def assert_equals_reference(matrix: QuantizedMatrix) -> None:
    poisoned = torch.full((matrix.rows, matrix.columns), float("nan"), dtype=matrix.dtype, device=matrix.codes.device)
    found = dequantize_kernel(matrix, poisoned)
    wanted = dequantize_ref(matrix)
    assert found is poisoned
    if INTERPRETED and matrix.dtype == torch.bfloat16:  # the interpreter cuts places off instead of rounding
        place = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(found.float(), wanted.float(), rtol=place, atol=0)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("format", [*filter(has_whole_bytes, FORMATS), *FRAGMENTS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_equals_the_reference(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in filter(lambda shape: fits(format, shape), (*SMALL, *SMALL_FRAGMENTS)):
        assert_equals_reference(random_matrix(format, shape.rows, shape.columns, dtype, kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "shape"), LARGE_CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_matrices(format: QuantFormat, dtype: torch.dtype, shape: Shape) -> None:
    torch.manual_seed(0)
    assert_equals_reference(random_matrix(format, shape.rows, shape.columns, dtype, "cuda"))


@given(
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    rows=st.integers(1, 40),
    groups=st.integers(1, 9),
    group_size=st.integers(1, 70),
)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"))
def test_any_shape(bits: int, symmetric: bool, rows: int, groups: int, group_size: int) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    format = QuantFormat(4 if bits == 4 else 8, group_size, symmetric)
    assume(has_whole_bytes(format))
    assert_equals_reference(random_matrix(format, rows, groups * group_size, torch.float16, device))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_follows_the_definition(format: QuantFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, 3, 480, dtype, "cpu")
    columns_per_scale = 480 // matrix.scales.shape[1]
    found = dequantize(matrix)
    for row, column in ((0, 0), (1, 1), (2, 479), (2, 31), (1, 32), (0, 95), (1, 97), (2, 254)):
        if format.bits == 4:
            code = float(matrix.codes[row, column // 2].item() >> (4 * (column % 2)) & 15)
        else:
            code = matrix.codes[row, column].float().item()
        zero = 8.0 if format.bits == 4 and format.symmetric else 0.0
        if matrix.zeros is not None:
            zero = matrix.zeros[row, column // columns_per_scale].item()
        value = (code - zero) * matrix.scales[row, column // columns_per_scale].item()
        assert found[row, column].item() == torch.tensor(value, dtype=torch.float64).to(dtype).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "format", [QuantFormat(8), QuantFormat(8, symmetric=False), QuantFormat(8, is_float=True), QuantFormat(4)], ids=str
)
def test_every_byte(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    matrix = QuantizedMatrix.empty(format, 256, 32 if format.bits == 4 else 16, dtype, kernel_device)
    bytes_of = matrix.codes.view(torch.uint8)
    bytes_of.copy_(torch.arange(256, device=kernel_device).unsqueeze(1).expand_as(bytes_of))
    matrix.scales.fill_(1)
    if matrix.zeros is not None:
        matrix.zeros.zero_()
    if format.is_float:
        bytes_of[bytes_of & 127 == 127] = 0  # NaN, which no matrix holds
    found = dequantize_kernel(matrix)
    assert torch.equal(found, dequantize_ref(matrix))
    assert found.unique().numel() == {4: 16, 8: 253 if format.is_float else 256}[format.bits]


def test_the_cpu_takes_rows_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(QuantFormat(4, group_size=32), 37, 320, torch.float16, "cpu")
    wanted, heights = dequantize_ref(matrix), []

    def recorded(part: QuantizedMatrix) -> torch.Tensor:
        heights.append(part.rows)
        return dequantize_ref(part)

    monkeypatch.setattr(module, "_SLICE_ELEMENTS", 10 * 320)
    monkeypatch.setattr(module, "dequantize_ref", recorded)
    assert torch.equal(dequantize(matrix), wanted)
    assert heights == [10, 10, 10, 7]


def test_no_rows() -> None:
    assert dequantize(QuantizedMatrix.empty(QuantFormat(8), 0, 16, torch.float16, "cpu")).shape == (0, 16)
