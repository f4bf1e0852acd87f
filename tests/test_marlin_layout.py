"""The order of fragments: every code and scale where `kernels/quantized.py` says, the same values in either order."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from foreign_support import Weights, assert_reads, awq_parts, gptq_parts, packed_parts, packed_scheme, read, scheme_of
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kernel_cases import FRAGMENTS, HALVES, random_matrix

from zinfer.kernels import dequantize as dequantize_module
from zinfer.kernels import quantize as quantize_module
from zinfer.kernels import scaling as scaling_module
from zinfer.kernels.dequantize import codes_of, dequantize, dequantize_ref
from zinfer.kernels.marlin_layout import codes_in_fragments, in_rows, scales_in_fragments, scales_in_rows
from zinfer.kernels.quantize import least_error_range, pack_int4, quantize
from zinfer.kernels.quantized import FRAGMENT_GROUPS, QuantFormat, QuantizedMatrix
from zinfer.kernels.scaling import scale_columns_into, weighted_error
from zinfer.weights.formats import Scheme, awq
from zinfer.weights.formats import packing as filling
from zinfer.weights.slab_matrix import SlabMatrix

GROUPS_OF_128 = QuantFormat(4, 128, in_fragments=True)


@given(blocks=st.integers(1, 2), units=st.integers(1, 2), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=5)
def test_every_code_lies_where_it_should_and_comes_back(blocks: int, units: int, seed: int) -> None:
    rows, columns = 64 * blocks, 256 * units
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_int4(codes)
    stored = codes_in_fragments(packed)
    assert stored.shape == packed.shape
    assert stored.is_contiguous()
    octets, values = iter(stored.flatten().tolist()), codes.tolist()
    for block, step, tile, g, t, b in product(
        range(blocks), range(columns // 64), range(4), range(8), range(4), range(16)
    ):
        row = 64 * block + 16 * tile + g
        column = 64 * step + 32 * (b // 8) + 8 * t + 4 * (b // 4 % 2) + (0, 2, 1, 3)[b % 4]
        assert next(octets) == values[row][column] | values[row + 8][column] << 4
    assert next(octets, None) is None
    matrix = QuantizedMatrix(GROUPS_OF_128, columns, torch.float32, stored, torch.ones(rows, columns // 128))
    assert torch.equal(in_rows(matrix).codes, packed)
    assert torch.equal(codes_of(matrix), codes.to(torch.int8) - 8)


@given(blocks=st.integers(1, 3), groups=st.integers(1, 5))
def test_every_scale_lies_where_it_should_and_comes_back(blocks: int, groups: int) -> None:
    scales = torch.arange(64 * blocks * groups, dtype=torch.float64).view(64 * blocks, groups)
    stored = scales_in_fragments(scales)
    assert stored.shape == scales.shape
    found, values = iter(stored.flatten().tolist()), scales.tolist()
    for block, group, g, tile, h in product(range(blocks), range(groups), range(8), range(4), range(2)):
        assert next(found) == values[64 * block + 16 * tile + 8 * h + g][group]
    assert next(found, None) is None
    assert torch.equal(scales_in_rows(stored), scales)


@pytest.mark.parametrize(
    ("format", "rows", "columns", "lies"),
    [
        (QuantFormat(4, 64), 64, 256, True),
        (QuantFormat(4, 128), 28672, 7168, True),
        (QuantFormat(4, 256, scales_columns=True), 192, 768, True),
        (QuantFormat(4, 128, orders_columns=True), 64, 512, True),
        (QuantFormat(4, 128), 96, 256, False),
        (QuantFormat(4, 128), 64, 384, False),
        (QuantFormat(4, 32), 64, 256, False),
        (QuantFormat(4), 64, 256, False),
        (QuantFormat(4, 128, symmetric=False), 64, 256, False),
        (QuantFormat(8, 128), 64, 256, False),
    ],
    ids=str,
)
def test_which_matrices_lie_so(format: QuantFormat, rows: int, columns: int, lies: bool) -> None:
    found = format.arranged(rows, columns)
    assert found == replace(format, in_fragments=lies)
    assert found.arranged(rows, columns) == found
    assert found.arranged(rows + 1, columns) == format
    found.check_shape(rows, columns)
    shapes = found.part_shapes(rows, columns)
    assert shapes == format.part_shapes(rows, columns)


def test_experts_lie_so_where_each_of_them_is_of_whole_blocks() -> None:
    def lies(*shape: int, transposed: bool = False) -> bool:
        place = SlabMatrix("w", torch.float16, shape, format=QuantFormat(4, 128), transposed=transposed)
        return place.arranged.format.in_fragments

    assert lies(4, 64, 256)
    assert not lies(4, 96, 256)  # 384 rows in all
    assert lies(256, 64, transposed=True)
    assert not lies(64, 256, transposed=True)


def test_what_cannot_lie_so_is_refused() -> None:
    for format in (QuantFormat(4), QuantFormat(8, 128), QuantFormat(4, 128, symmetric=False), QuantFormat(4, 32)):
        with pytest.raises(ValueError, match="fragments hold 4 bits, symmetric, in groups of"):
            replace(format, in_fragments=True)
    for rows, columns in ((96, 256), (64, 384)):
        with pytest.raises(ValueError, match=f"do not divide {rows} rows and {columns} columns"):
            QuantizedMatrix.empty(GROUPS_OF_128, rows, columns, torch.float16, "cpu")


def test_parts_are_whole_blocks() -> None:
    matrix = random_matrix(GROUPS_OF_128, 192, 256, torch.float16, "cpu")
    assert torch.equal(dequantize_ref(matrix.part(slice(64, 192))), dequantize_ref(matrix)[64:])
    assert matrix.part(slice(64, 128)).codes.data_ptr() == matrix.codes[64].data_ptr()
    for rows in (slice(0, 63), slice(32, 96), slice(1, None)):
        with pytest.raises(AssertionError):
            matrix.part(rows)


@pytest.mark.parametrize("size", FRAGMENT_GROUPS)
@pytest.mark.parametrize("bounds", [quantize_module.full_range, least_error_range], ids=["full", "clip"])
def test_quantizing_gives_the_same_values_in_either_order(
    device: str, size: int, bounds: quantize_module.Bounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.randn(192, 512, generator=torch.Generator().manual_seed(1)).to(device)
    format = QuantFormat(4, size)
    wanted = quantize(weights, format, torch.float16, bounds)
    monkeypatch.setattr(quantize_module, "_SLICE_ELEMENTS", 100 * 512)
    found = quantize(weights, format.arranged(192, 512), torch.float16, bounds)
    assert found.format.in_fragments
    assert torch.equal(in_rows(found).codes, wanted.codes)
    assert torch.equal(in_rows(found).scales, wanted.scales)
    assert not torch.equal(found.codes, wanted.codes)
    assert torch.equal(dequantize(found), dequantize(wanted))


def test_columns_are_scaled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights, squares = torch.randn(192, 256), torch.rand(256) * 100
    format = QuantFormat(4, 128, scales_columns=True)
    found = QuantizedMatrix.empty(format.arranged(192, 256), 192, 256, torch.float32, "cpu")
    wanted = QuantizedMatrix.empty(format, 192, 256, torch.float32, "cpu")
    for target in (found, wanted):
        scale_columns_into(target, weights, squares)
    assert found.format.in_fragments
    assert torch.equal(dequantize_ref(found), dequantize_ref(wanted))
    monkeypatch.setattr(scaling_module, "_SLICE_ELEMENTS", 100 * 256)
    torch.testing.assert_close(weighted_error(found, weights, squares), weighted_error(wanted, weights, squares))


@pytest.mark.parametrize("format", FRAGMENTS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_cpu_dequantizes_whole_blocks(
    format: QuantFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = random_matrix(format, 192, 512, dtype, "cpu")
    wanted = dequantize_ref(in_rows(matrix))
    monkeypatch.setattr(dequantize_module, "_SLICE_ELEMENTS", 150 * 512)
    assert list(matrix.slices(150 * 512)) == [slice(0, 128), slice(128, 192)]
    assert torch.equal(dequantize(matrix), wanted)


FOREIGN: Mapping[str, tuple[Scheme, bool]] = {
    "gptq": (scheme_of("gptq", bits=4, group_size=128, sym=True, desc_act=False), False),
    "gptq in order": (scheme_of("gptq", bits=4, group_size=128, sym=True, desc_act=True), True),
    "awq": (scheme_of("awq", group_size=128, zero_point=False), False),
    "compressed-tensors": (packed_scheme(4, strategy="group", group_size=128, symmetric=True), False),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_other_tools_quantized_is_put_in_order(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, is_scattered = FOREIGN[name]
    weights = Weights.random(192, 512, 4, 4, True, seed=5)
    if is_scattered:
        weights = weights.scattered(3)
    parts = {
        "gptq": lambda: gptq_parts(weights, 4, less_one=True),
        "awq": lambda: awq_parts(weights),
        "compressed-tensors": lambda: packed_parts(weights, 4, symmetric=True),
    }[name.split()[0]]()
    for module in (filling, awq):
        monkeypatch.setattr(module, "SLICE_ELEMENTS", 100 * 512)
    matrix = read(scheme, parts, device=device, arranged=True)
    assert matrix.format.in_fragments
    assert_reads(matrix, weights.values(torch.float16))
