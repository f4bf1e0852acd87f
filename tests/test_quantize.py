"""Rounding to nearest: within half a step of the stored scale, for every format, dtype, shape and edge."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FORMATS

from zinfer.kernels import quantize as quantize_module
from zinfer.kernels.dequantize import codes_of, dequantize_ref
from zinfer.kernels.quantize import CannotQuantize, decode, encode, fit, pack_int4, quantize
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = 1e-5  # of float32, in steps


@st.composite
def formats(draw: st.DrawFn) -> QuantFormat:
    if draw(st.integers(0, 4)) == 0:
        return QuantFormat(8, draw(st.sampled_from([None, 32])), is_float=True)
    return QuantFormat(
        draw(st.sampled_from([4, 8])),
        draw(st.sampled_from([None, 1, 3, 32])),
        draw(st.booleans()),
        group_rows=draw(st.sampled_from([1, 2, None])),
    )


@st.composite
def matrices(draw: st.DrawFn, format: QuantFormat) -> torch.Tensor:
    """Of any size that the format divides, any magnitude that the dtype holds, with zeros and outliers."""
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(st.integers(1, 4)) * (format.group_rows or 1)
    columns = draw(st.integers(1, 4)) * (format.group_size or draw(st.sampled_from([1, 5, 7])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    finfo = torch.finfo(dtype)
    exponent = draw(st.floats(math.log10(finfo.smallest_normal) - 2, math.log10(finfo.max) - 3))
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 10**exponent
    edge = draw(st.sampled_from(["none", "zeros", "zero row", "outlier", "one sign"]))
    if edge == "zeros":
        matrix.zero_()
    elif edge == "zero row":
        matrix[0] = 0
    elif edge == "outlier":
        matrix[0, 0] *= 100
    elif edge == "one sign":
        matrix = matrix.abs()
    return matrix.to(dtype)


def steps_of(matrix: QuantizedMatrix, values: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring codes around each value, float64 [rows, columns]."""
    scales = matrix.scales.double().repeat_interleave(matrix.columns // matrix.scales.shape[1], dim=1)
    if not matrix.format.is_float:
        return scales
    # e4m3: three bits behind the leading one, normal from 2^-6 on (Micikevicius et al. 2022, table 1).
    magnitude = torch.where(scales > 0, values.abs() / scales, 0).clamp(min=2.0**-6)
    return scales * 2 ** (magnitude.log2().floor() - 3)


@given(data=st.data())
def test_every_element_is_within_half_a_step(data: Any) -> None:
    format = data.draw(formats())
    matrix = data.draw(matrices(format))
    stored = quantize(matrix, format)
    assert stored.codes.dtype == format.codes_dtype
    assert stored.codes.shape == format.part_shapes(*matrix.shape)["codes"]
    values = dequantize_ref(stored, torch.float64)
    steps = torch.maximum(steps_of(stored, matrix.double()), steps_of(stored, values))
    error = (exactly(stored) - matrix.double()).abs()
    assert (error <= steps * (0.5 + ROUNDING)).all(), (error / steps).max()
    assert (values[matrix == 0] == 0).all()


def exactly(matrix: QuantizedMatrix) -> torch.Tensor:
    """The definition, element by element in float64: (code - zero) * scale."""
    codes = codes_of(matrix).double()
    size = matrix.columns // matrix.scales.shape[1]
    zeros = 0 if matrix.zeros is None else matrix.zeros.double().repeat_interleave(size, dim=1)
    return (codes - zeros) * matrix.scales.double().repeat_interleave(size, dim=1)


@given(data=st.data())
def test_dequantizing_is_the_definition_rounded_once(data: Any) -> None:
    format = data.draw(formats())
    stored = quantize(data.draw(matrices(format)), format)
    expected = exactly(stored)
    assert torch.equal(dequantize_ref(stored), expected.float().to(stored.dtype))


@given(data=st.data())
def test_scales_are_shared_as_the_format_says(data: Any) -> None:
    format = data.draw(formats())
    stored = quantize(data.draw(matrices(format)), format)
    scales = stored.scales.view(-1, format.group_rows or stored.rows, stored.scales.shape[1])
    assert (scales == scales[:, :1]).all()


def test_slices_of_rows_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(37, 64)
    whole = quantize(matrix, QuantFormat(4, 32, symmetric=False))
    monkeypatch.setattr(quantize_module, "_SLICE_ELEMENTS", 64 * 5)
    sliced = quantize(matrix, QuantFormat(4, 32, symmetric=False))
    assert torch.equal(whole.codes, sliced.codes)
    assert torch.equal(whole.scales, sliced.scales)
    assert whole.zeros is not None
    assert sliced.zeros is not None
    assert torch.equal(whole.zeros, sliced.zeros)


def test_a_transposed_matrix_is_taken_as_it_is_seen() -> None:
    matrix = torch.randn(64, 10)
    format = QuantFormat(8, 32)
    assert torch.equal(quantize(matrix.t(), format).codes, quantize(matrix.t().contiguous(), format).codes)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused_with_its_place(value: float) -> None:
    matrix = torch.zeros(5, 32)
    matrix[3, 17] = value
    with pytest.raises(CannotQuantize, match=f"row 3, column 17 is {value}"):
        quantize(matrix, QuantFormat(8))


def test_magnitudes_beyond_the_scales_dtype_are_refused() -> None:
    with pytest.raises(CannotQuantize, match=r"magnitudes up to 1e\+20 need scales beyond torch.float16"):
        quantize(torch.full((2, 2), 1e20), QuantFormat(8), torch.float16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits must be 4 or 8, not 3"),
        ({"bits": 4, "group_size": 0}, "group_size must be at least 1, not 0"),
        ({"bits": 4, "is_float": True, "symmetric": False}, "floating-point formats.* are symmetric"),
        ({"bits": 8, "in_grid": True, "symmetric": False}, "a grid of scales, are symmetric"),
    ],
)
def test_formats_that_do_not_exist_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantFormat(**arguments)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size 32 does not divide the 40 columns"):
        quantize(torch.zeros(2, 40), QuantFormat(4, 32))
    with pytest.raises(ValueError, match="group_rows 2 does not divide the 3 rows"):
        quantize(torch.zeros(3, 32), QuantFormat(4, 32, group_rows=2))


@given(rows=st.integers(0, 4), columns=st.integers(0, 9))
def test_two_codes_share_a_byte_the_first_in_its_low_half(rows: int, columns: int) -> None:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (rows, -(-columns // 2))
    for row in range(rows):
        for column in range(columns):
            byte = int(packed[row, column // 2])
            assert (byte >> 4 if column % 2 else byte & 15) == codes[row, column]


@given(data=st.data())
def test_decode_is_what_a_stored_matrix_holds(data: Any) -> None:
    format = data.draw(formats().filter(lambda format: format.group_rows == 1))
    matrix = data.draw(matrices(format))
    groups = matrix.float().view(matrix.shape[0], format.num_groups(matrix.shape[1]), -1)
    scales, zeros = fit(groups.amin(-1), groups.amax(-1), format, matrix.dtype)
    decoded = decode(encode(groups, scales, zeros, format), scales, zeros).view(matrix.shape)
    assert torch.equal(decoded.to(matrix.dtype), dequantize_ref(quantize(matrix, format)))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_gpu_gives_the_same_codes_scales_and_zeros(format: QuantFormat, dtype: torch.dtype) -> None:
    matrix = torch.randn(330, 960, generator=torch.Generator().manual_seed(5)).to(dtype)
    found, wanted = quantize(matrix.cuda(), format), quantize(matrix, format)
    assert torch.equal(found.scales.cpu(), wanted.scales)
    assert torch.equal(found.codes.cpu().view(torch.uint8), wanted.codes.view(torch.uint8))
    if wanted.zeros is not None:
        assert found.zeros is not None
        assert torch.equal(found.zeros.cpu(), wanted.zeros)
