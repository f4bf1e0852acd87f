"""Products with quantized matrices: the fused kernel beside float64, repeated, cut into parts, and what it refuses."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kernel_cases import (
    BLOCKS_FP8,
    DTYPES,
    FORMATS,
    FRAGMENTS,
    HALVES,
    LARGE_CASES,
    MXFP4,
    MXFP8,
    NVFP4,
    PUBLISHED,
    SMALL,
    Shape,
    allowed_error,
    fits,
    quantized_linear_ref,
    random_input,
    random_matrix,
)
from kernel_tiles import fused_candidates
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from zinfer.kernels.dequantize import dequantize, dequantize_ref
from zinfer.kernels.fragment_linear import fragment_linear
from zinfer.kernels.fused_linear import can_fuse, fused_linear
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.kernels.quantized_linear import is_fused, quantized_linear
from zinfer.kernels.scaled_linear import can_scale, scaled_linear
from zinfer.kernels.tiles import Cut, FusedTiles, block_tokens_for, most_columns, tiles_for

SCALED = (MXFP8, MXFP4, NVFP4, replace(NVFP4, outer="over", outer_rows=32))
FUSED = [format for format in FORMATS if format.group_size != 5]
PLAIN = FusedTiles(16, 32, 64, 4, 2, 1, False)
"""Small tiles, and the columns summed by one program."""


def assert_right(
    found: torch.Tensor, x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None, rounds: bool = False
) -> None:
    wanted = quantized_linear_ref(x, matrix, bias)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    distance = (found.double() - wanted.double()).abs()
    worst = (distance / allowed_error(x, matrix, wanted, rounds)).max().item()
    assert worst <= 1, f"{worst} times the allowed error"


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", FUSED, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weights_left", [True, False], ids=["weights-left", "weights-right"])
def test_the_fused_kernel(kernel_device: str, format: QuantFormat, dtype: torch.dtype, weights_left: bool) -> None:
    torch.manual_seed(0)
    for shape in filter(lambda shape: fits(format, shape), SMALL):
        matrix = random_matrix(format, shape.rows, shape.columns, dtype, kernel_device)
        x, bias = random_input(shape, dtype, kernel_device)
        tiles = FusedTiles(block_tokens_for(shape.tokens), 64, 128, 4, 2, 1, weights_left)
        whole = fused_linear(x, matrix, bias, tiles)
        assert_right(whole, x, matrix, bias)
        parts = fused_linear(x, matrix, bias, replace(tiles, programs=64))
        assert_right(parts, x, matrix, bias)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", [format for format in PUBLISHED if format.bits == 8], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weights_left", [True, False], ids=["weights-left", "weights-right"])
def test_published_e4m3(kernel_device: str, format: QuantFormat, dtype: torch.dtype, weights_left: bool) -> None:
    """Grids whose last blocks are cut, of rows and of columns, and scales in each type."""
    torch.manual_seed(0)
    for shape in filter(lambda shape: fits(format, shape), (Shape(3, 150, 224), Shape(5, 33, 35))):
        matrix = random_matrix(format, shape.rows, shape.columns, dtype, kernel_device)
        assert can_fuse(matrix)
        x, bias = random_input(shape, dtype, kernel_device)
        tiles = FusedTiles(8 if weights_left else 16, 64, 64, 4, 2, 1, weights_left)
        for programs in (1, 64):
            assert_right(fused_linear(x, matrix, bias, replace(tiles, programs=programs)), x, matrix, bias)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", SCALED, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_scales_of_small_groups(kernel_device: str, format: QuantFormat, tokens: int) -> None:
    """Columns that a step divides, summed by one program and by several, and a last step that is not full."""
    torch.manual_seed(0)
    for rows, columns in ((70, 1024), (33, 352)):
        matrix = random_matrix(format, rows, columns, torch.bfloat16, kernel_device)
        assert can_scale(matrix)
        x, bias = random_input(Shape(tokens, rows, columns), torch.bfloat16, kernel_device)
        found = scaled_linear(x, matrix, bias)
        assert_right(found, x, matrix, bias)
        assert torch.equal(found, scaled_linear(x, matrix, bias))


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_every_code_with_a_scale_of_its_own(kernel_device: str, format: QuantFormat) -> None:
    """Values of the matrix come out to the bit, whatever the scale within 2**-60 and 2**63."""
    size = format.group_size or 0
    matrix = QuantizedMatrix.empty(format, 256, 8 * size, torch.bfloat16, kernel_device)
    stored = matrix.codes.view(torch.uint8)
    stored.copy_(torch.arange(256, device=kernel_device).unsqueeze(1).expand_as(stored))
    if format.bits == 8:
        stored[stored & 127 == 127] = 0  # NaN, which no matrix holds
    if matrix.scales.dtype == torch.float8_e8m0fnu:
        powers = torch.tensor([74, 100, 115, 120, 127, 128, 150, 180], dtype=torch.uint8, device=kernel_device)
        matrix.scales.view(torch.uint8).copy_(powers.expand(256, 8))
    else:
        numbers = torch.tensor([2**-9, 2**-6, 0.6875, 1, 1.125, 13, 240, 448], device=kernel_device)
        matrix.scales.copy_(numbers.expand(256, 8))
        assert matrix.outer_scales is not None
        matrix.outer_scales.fill_(0.25)
    unit = torch.eye(matrix.columns, dtype=torch.bfloat16, device=kernel_device)
    assert torch.equal(scaled_linear(unit, matrix).T, dequantize_ref(matrix))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", [BLOCKS_FP8, *SCALED], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 16, 40, 128])
def test_large_products_of_published_formats(format: QuantFormat, tokens: int) -> None:
    torch.manual_seed(0)
    shape = Shape(tokens, 4160, 7168)
    matrix = random_matrix(format, shape.rows, shape.columns, torch.bfloat16, "cuda")
    assert is_fused(matrix, tokens)
    x, bias = random_input(shape, torch.bfloat16, "cuda")
    found = [quantized_linear(x, matrix, bias) for _ in range(5)]
    assert_right(found[0], x, matrix, bias)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("format", "shape"), LARGE_CASES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_products(format: QuantFormat, dtype: torch.dtype, shape: Shape) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, shape.rows, shape.columns, dtype, "cuda")
    x, bias = random_input(shape, dtype, "cuda")
    multiply = fragment_linear if format.in_fragments else fused_linear
    found = [multiply(x, matrix, bias) for _ in range(5)]
    assert_right(found[0], x, matrix, bias)
    assert all(torch.equal(found[0], other) for other in found)
    assert_right(functional.linear(x, dequantize(matrix), bias), x, matrix, bias, rounds=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 9, 17, 64, 65])
def test_every_candidate(bits: int, tokens: int) -> None:
    torch.manual_seed(0)
    shape = Shape(tokens, 1000, 4352)
    matrix = random_matrix(QuantFormat(4, 128) if bits == 4 else QuantFormat(8), 1000, 4352, torch.float16, "cuda")
    x, bias = random_input(shape, torch.float16, "cuda")
    assert_right(fused_linear(x, matrix, bias, tiles_for(bits, tokens)), x, matrix, bias)
    for tiles in fused_candidates(bits, tokens):
        with suppress(OutOfResources):  # deep stages of many tokens: the benchmark passes over them too
            assert_right(fused_linear(x, matrix, bias, tiles), x, matrix, bias)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", [QuantFormat(8), QuantFormat(8, symmetric=False), QuantFormat(4)], ids=str)
def test_every_byte(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    matrix = QuantizedMatrix.empty(format, 256, 32 if format.bits == 4 else 16, dtype, kernel_device)
    bytes_of = matrix.codes.view(torch.uint8)
    bytes_of.copy_(torch.arange(256, device=kernel_device).unsqueeze(1).expand_as(bytes_of))
    matrix.scales.fill_(1)
    if matrix.zeros is not None:
        matrix.zeros.zero_()
    unit = torch.eye(matrix.columns, dtype=dtype, device=kernel_device)
    assert torch.equal(fused_linear(unit, matrix).T, dequantize_ref(matrix))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", [QuantFormat(8), QuantFormat(4, 32, symmetric=False)], ids=str)
def test_the_same_arguments_give_the_same_bits(kernel_device: str, format: QuantFormat) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, 100, 960, torch.float16, kernel_device)
    x, bias = random_input(Shape(5, 100, 960), torch.float16, kernel_device)
    tiles = replace(PLAIN, programs=1000)
    assert Cut.of(5, matrix, tiles).num_parts > 2
    first = fused_linear(x, matrix, bias, tiles)
    assert all(torch.equal(first, fused_linear(x, matrix, bias, tiles)) for _ in range(3))


@given(
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    tokens=st.integers(1, 20),
    rows=st.integers(1, 70),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([32, 64, 96, 160]),
    programs=st.sampled_from([1, 50]),
)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.too_slow])
def test_a_token_does_not_see_the_others(
    bits: int, symmetric: bool, tokens: int, rows: int, groups: int, group_size: int, programs: int
) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    format = QuantFormat(4 if bits == 4 else 8, group_size, symmetric)
    matrix = random_matrix(format, rows, groups * group_size, torch.float16, device)
    x, bias = random_input(Shape(tokens, rows, matrix.columns), torch.float16, device)
    tiles = replace(PLAIN, programs=programs)
    found = fused_linear(x, matrix, bias, tiles)
    assert_right(found, x, matrix, bias)
    if Cut.of(tokens, matrix, tiles).num_parts == Cut.of(1, matrix, tiles).num_parts:
        alone = fused_linear(x[-1:], matrix, bias, tiles)
        torch.testing.assert_close(found[-1:], alone, rtol=torch.finfo(torch.float16).eps, atol=1e-6)


@pytest.mark.parametrize("format", [*FORMATS, *FRAGMENTS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_dequantizes(format: QuantFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = Shape(6, 64, 512) if format.in_fragments else Shape(6, 33, 480)
    matrix = random_matrix(format, shape.rows, shape.columns, dtype, "cpu")
    x, bias = random_input(shape, dtype, "cpu")
    assert torch.equal(quantized_linear(x, matrix, bias), functional.linear(x, dequantize(matrix), bias))


def test_leading_dimensions_strides_and_no_tokens(kernel_device: str) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(QuantFormat(4), 9, 70, torch.float16, kernel_device)
    wide = torch.randn(2, 3, 71, dtype=torch.float16, device=kernel_device)
    x = wide[..., 1:]
    assert_right(fused_linear(x, matrix).view(6, 9), x.reshape(6, 70), matrix, None)
    shifted = torch.randn(211, dtype=torch.float16, device=kernel_device)[1:].view(3, 70)
    assert shifted.data_ptr() % 4 == 2
    assert_right(fused_linear(shifted, matrix), shifted, matrix, None)
    assert fused_linear(x[:, :0], matrix).shape == (2, 0, 9)
    assert_right(fused_linear(x[0, 0], matrix).view(1, 9), x[0, :1], matrix, None)


def test_what_does_not_fit_is_refused() -> None:
    matrix = random_matrix(QuantFormat(8), 7, 64, torch.float16, "cpu")
    x = torch.zeros(2, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="last dimension must be the matrix's 64 columns"):
        quantized_linear(x[:, :63], matrix)
    with pytest.raises(ValueError, match=r"x is torch.float32 on cpu, the matrix torch.float16 on cpu"):
        quantized_linear(x.float(), matrix)
    with pytest.raises(ValueError, match=r"x is torch.float16 on meta, the matrix torch.float16 on cpu"):
        quantized_linear(x.to("meta"), matrix)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (QuantFormat(8, 5), torch.float16),
        (QuantFormat(4, 16), torch.float16),
        (QuantFormat(8), torch.float32),
        (NVFP4, torch.float16),
        (replace(NVFP4, outer=None), torch.float32),
    ],
    ids=str,
)
def test_what_the_fused_kernels_leave_to_the_other_way(format: QuantFormat, dtype: torch.dtype) -> None:
    matrix = random_matrix(format, 4, 80, dtype, "cpu")
    assert not can_fuse(matrix)
    assert not can_scale(matrix)


@given(
    bits=st.sampled_from([4, 8]),
    tokens=st.integers(1, 300),
    rows=st.integers(1, 5000),
    groups=st.integers(1, 60),
    group_size=st.sampled_from([32, 96, 128]),
)
def test_a_cut_covers_each_step_once(bits: int, tokens: int, rows: int, groups: int, group_size: int) -> None:
    format = QuantFormat(4 if bits == 4 else 8, group_size)
    matrix = QuantizedMatrix.empty(format, rows, groups * group_size, torch.float16, "meta")
    for tiles in (tiles_for(bits, tokens), *fused_candidates(bits, tokens)):
        cut = Cut.of(tokens, matrix, tiles)
        num_steps = -(-cut.width // cut.block)
        assert cut.num_parts * cut.steps >= num_steps > (cut.num_parts - 1) * cut.steps
        assert cut.block * 8 // bits <= tiles.block_columns
        if groups > 1:
            assert most_columns(matrix) * matrix.format.bits // 8 % cut.block == 0
            assert cut.steps_per_group * cut.block * 8 // bits == group_size


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 33, 64, 65, 4096])
def test_tables_of_tiles(bits: int, tokens: int) -> None:
    found = list(fused_candidates(bits, tokens))
    assert len(found) == len(set(found)) <= 30
    assert {tiles.block_tokens for tiles in (*found, tiles_for(bits, tokens))} == {block_tokens_for(tokens)}
    assert block_tokens_for(tokens) >= min(tokens, 64)


def test_scales_may_lie_in_any_order(kernel_device: str) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(QuantFormat(4, 32, symmetric=False), 100, 960, torch.float16, kernel_device)
    x, bias = random_input(Shape(3, 100, 960), torch.float16, kernel_device)
    assert matrix.zeros is not None
    turned = replace(matrix, scales=matrix.scales.T.contiguous().T, zeros=matrix.zeros.T.contiguous().T)
    assert torch.equal(fused_linear(x, turned, bias), fused_linear(x, matrix, bias))
