"""Quantized matrices back in full: the kernel equals its reference to the bit, the reference the definition."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kernel_cases import (
    BLOCKS_FP8,
    DTYPES,
    FORMATS,
    FRAGMENTS,
    LARGE,
    LARGE_CASES,
    NVFP4,
    PUBLISHED,
    SMALL,
    SMALL_FRAGMENTS,
    TYPICAL_PUBLISHED,
    Shape,
    fits,
    random_matrix,
)

from zinfer.kernels import dequantize as module
from zinfer.kernels.dequantize import dequantize, dequantize_kernel, dequantize_ref
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix


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
@pytest.mark.parametrize("format", [*FORMATS, *FRAGMENTS, *PUBLISHED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_equals_the_reference(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in filter(lambda shape: fits(format, shape), (*SMALL, *SMALL_FRAGMENTS)):
        assert_equals_reference(random_matrix(format, shape.rows, shape.columns, dtype, kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "shape"), [*LARGE_CASES, *((format, LARGE[2]) for format in TYPICAL_PUBLISHED)], ids=str
)
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


def value_of(matrix: QuantizedMatrix, row: int, column: int) -> float:
    """An element of a published format as its definition has it, in Python's numbers."""
    format, byte = matrix.format, matrix.codes.view(torch.uint8)
    if format.bits == 4:
        code = byte[row, column // 2].item() >> 4 * (column % 2) & 15
        exponent, mantissa = code >> 1 & 3, (code & 1) / 2
        value = (1 + mantissa) * 2 ** (exponent - 1) if exponent else mantissa
        value = -value if code >> 3 else value
    else:
        value = matrix.codes[row, column].float().item()
    row_of_scale = row if not format.in_grid else row // (format.group_rows or matrix.rows)
    stored = matrix.scales[row_of_scale, column // (format.group_size or matrix.columns)]
    is_power = format.scale_dtype == "float8_e8m0fnu"
    scale = 2.0 ** (int(stored.view(torch.uint8)) - 127) if is_power else stored.float().item()
    if matrix.outer_scales is not None:
        outer = matrix.outer_scales[row // (format.outer_rows or matrix.rows)].item()
        scale = scale * outer if format.outer == "times" else scale / outer
    return value * scale


@pytest.mark.parametrize("format", PUBLISHED, ids=str)
def test_published_formats_follow_their_definitions(format: QuantFormat) -> None:
    torch.manual_seed(0)
    for shape in filter(lambda shape: fits(format, shape), (Shape(1, 7, 160), Shape(1, 53, 192), Shape(1, 33, 35))):
        matrix = random_matrix(format, shape.rows, shape.columns, torch.float32, "cpu")
        wanted = [[value_of(matrix, row, column) for column in range(shape.columns)] for row in range(shape.rows)]
        torch.testing.assert_close(dequantize(matrix), torch.tensor(wanted), rtol=2**-22, atol=0)
        assert torch.equal(dequantize(replace(matrix, dtype=torch.bfloat16)), dequantize(matrix).bfloat16())


@pytest.mark.parametrize("format", PUBLISHED, ids=str)
@pytest.mark.parametrize("most_rows", [1, 50, 130, 1000])
def test_parts_of_published_formats(format: QuantFormat, most_rows: int) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, 300, 96 if format.group_size != 128 else 256, torch.float32, "cpu")
    slices = list(matrix.slices(most_rows * matrix.columns))
    parts = [matrix.part(rows) for rows in slices]
    assert torch.equal(torch.cat([dequantize_ref(part) for part in parts]), dequantize_ref(matrix))
    assert max(part.rows for part in parts) <= most_rows
    for part in parts:
        shapes = format.part_shapes(part.rows, matrix.columns)
        assert {name: tuple(getattr(part, name).shape) for name in shapes} == shapes
        assert {name: getattr(part, name).dtype for name in shapes} == {
            name: format.part_dtype(name, torch.float32) for name in shapes
        }


def test_every_code_and_scale_of_one_byte() -> None:
    """e2m1 in pairs with scales of e4m3, and powers of two down to those below float32's normal numbers."""
    matrix = QuantizedMatrix.empty(replace(NVFP4, outer=None), 256, 32, torch.float32, "cpu")
    byte = torch.arange(256, dtype=torch.uint8)
    matrix.codes.copy_(byte.unsqueeze(1).expand_as(matrix.codes))
    matrix.scales.copy_(torch.ones(256, 2))
    assert dequantize(matrix)[:, :2].unique().tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    powers = QuantizedMatrix.empty(
        QuantFormat(8, is_float=True, scale_dtype="float8_e8m0fnu"), 255, 2, torch.float32, "cpu"
    )
    powers.codes.copy_(torch.ones(255, 2))
    powers.scales.view(torch.uint8).copy_(byte[:255, None])
    assert dequantize(powers)[:, 1].tolist() == [2.0 ** (number - 127) for number in range(255)]


def test_matrices_that_share_scales_can_lie_one_below_the_other() -> None:
    """Only after whole blocks, and where the second level's scales say whose rows are whose."""
    assert QuantFormat(8).can_follow(7)
    assert BLOCKS_FP8.can_follow(256)
    assert not BLOCKS_FP8.can_follow(576)
    assert not replace(BLOCKS_FP8, group_rows=None).can_follow(256)
    assert not NVFP4.can_follow(64)
    assert replace(NVFP4, outer_rows=64).can_follow(128)


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


@pytest.mark.parametrize("format", [QuantFormat(8), BLOCKS_FP8, NVFP4], ids=str)
def test_no_rows_or_columns(format: QuantFormat) -> None:
    for shape in ((0, 16), (3, 0), (0, 0)):
        matrix = QuantizedMatrix.empty(format, *shape, torch.float16, "cpu")
        assert dequantize(matrix).shape == dequantize_ref(matrix).shape == shape
