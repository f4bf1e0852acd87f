"""GPTQ checkpoints hold, once read, exactly the values that their tools read out of them."""

import pytest
import torch
from foreign_support import PARAMETER, Weights, assert_reads, gptq_parts, read, scheme_of
from hypothesis import given
from hypothesis import strategies as st

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 40),
    group_size=st.sampled_from([None, 6, 8, 32, 128]),
    groups=st.integers(1, 4),
    symmetric=st.booleans(),
    format=st.sampled_from(["gptq", "gptq_v2"]),
    index=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 999),
)
def test_values_are_those_of_the_codes(
    bits: int,
    rows: int,
    group_size: int | None,
    groups: int,
    symmetric: bool,
    format: str,
    index: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    groups = groups if group_size else 1
    columns = groups * (group_size or 48)
    index = index or columns % (32 // bits) != 0  # without it the columns are those that the words have room for
    weights = Weights.random(rows, columns, groups, bits, symmetric, seed)
    parts = gptq_parts(weights, bits, less_one=format == "gptq", index=index)
    scheme = scheme_of("gptq", bits=bits, group_size=group_size or -1, sym=symmetric, checkpoint_format=format)
    matrix = read(scheme, parts, dtype)
    assert matrix.format == QuantFormat(4 if bits == 4 else 8, group_size if groups > 1 else None, symmetric)
    assert_reads(matrix, weights.values(dtype))


def test_reads_on_the_device(device: str) -> None:
    weights = Weights.random(64, 256, 2, 4, False, seed=1)
    scheme = scheme_of("gptq", bits=4, group_size=128, sym=False)
    assert_reads(read(scheme, gptq_parts(weights, 4, less_one=True), device=device), weights.values(torch.float16))


def test_format_is_gptq_and_weights_are_symmetric_unless_the_config_says_otherwise() -> None:
    weights = Weights.random(16, 256, 2, 4, True, seed=2)
    matrix = read(scheme_of("gptq", bits=4), gptq_parts(weights, 4, less_one=True))
    assert matrix.format == QuantFormat(4, 128)
    assert_reads(matrix, weights.values(torch.float16))


def test_activation_order_in_static_groups_is_read() -> None:
    weights = Weights.random(16, 64, 2, 4, True, seed=3)
    scheme = scheme_of("gptq", bits=4, group_size=32, desc_act=True, static_groups=True)
    assert_reads(read(scheme, gptq_parts(weights, 4, less_one=True)), weights.values(torch.float16))


@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([6, 8, 32, 128]),
    groups=st.integers(2, 5),
    symmetric=st.booleans(),
    seed=st.integers(0, 999),
)
def test_groups_that_activation_order_has_scattered_are_read(
    bits: int, group_size: int, groups: int, symmetric: bool, seed: int
) -> None:
    weights = Weights.random(12, groups * group_size, groups, bits, symmetric, seed).scattered(seed)
    scheme = scheme_of("gptq", bits=bits, group_size=group_size, sym=symmetric, desc_act=True)
    matrix = read(scheme, gptq_parts(weights, bits, less_one=True))
    assert matrix.format.orders_columns
    assert_reads(matrix, weights.values(torch.float16))


def test_scattered_groups_are_refused_if_the_config_does_not_say_so() -> None:
    parts = gptq_parts(Weights.random(16, 64, 2, 4, True, seed=4), 4, less_one=True)
    parts["g_idx"][3] = 1
    with pytest.raises(
        CheckpointError, match=r"g_idx puts column 3 into group 1 instead of 0: .* does not say desc_act"
    ):
        read(scheme_of("gptq", bits=4, group_size=32), parts)


@pytest.mark.parametrize(
    ("column", "group", "message"),
    [
        (3, 1, r"g_idx puts 31 columns into group 0, but group_size is 32"),
        (3, 2, r"g_idx puts 31 columns into group 0, but group_size is 32"),
        (40, -1, r"g_idx puts 33 columns into group 0, but group_size is 32"),
    ],
)
def test_damaged_indices_are_refused(column: int, group: int, message: str) -> None:
    parts = gptq_parts(Weights.random(16, 64, 2, 4, True, seed=4), 4, less_one=True)
    parts["g_idx"][column] = group
    with pytest.raises(CheckpointError, match=message):
        read(scheme_of("gptq", bits=4, group_size=32, desc_act=True), parts)


def test_activation_order_without_an_index_is_refused() -> None:
    parts = gptq_parts(Weights.random(16, 64, 2, 4, True, seed=5), 4, less_one=True, index=False)
    with pytest.raises(CheckpointError, match=r"up_proj has qweight, qzeros, scales but no g_idx"):
        read(scheme_of("gptq", bits=4, group_size=32, desc_act=True), parts)


@pytest.mark.parametrize(("bits", "middle"), [(4, 8), (8, 128)])
def test_zeros_off_the_middle_are_refused_if_the_config_says_symmetric(bits: int, middle: int) -> None:
    weights = Weights.random(16, 64, 2, bits, True, seed=6)
    weights.zeros[5, 1] = 3
    with pytest.raises(CheckpointError, match=rf"qzeros holds the zero 3, .* symmetric about {middle}: correct config"):
        read(scheme_of("gptq", bits=bits, group_size=32), gptq_parts(weights, bits, less_one=True))


def test_scales_that_the_dtype_does_not_hold_are_refused() -> None:
    weights = Weights.random(16, 64, 2, 4, True, seed=7, dtype=torch.float32)
    for scale, found in ((1e6, r"1e\+06"), (1e-9, "1e-09")):
        weights.scales[3, 1] = scale
        parts = gptq_parts(weights, 4, less_one=True)
        with pytest.raises(
            CheckpointError, match=rf"scales holds {found}, beyond torch.float16: run the model in bfloat16"
        ):
            read(scheme_of("gptq", bits=4, group_size=32), parts, torch.float16)
    weights.scales[3, 1] = float("nan")
    with pytest.raises(CheckpointError, match="scales holds infinities or NaN"):
        read(scheme_of("gptq", bits=4, group_size=32), gptq_parts(weights, 4, less_one=True), torch.float32)


def test_parts_of_another_dtype_are_refused() -> None:
    parts = gptq_parts(Weights.random(16, 64, 2, 4, True, seed=8), 4, less_one=True)
    with pytest.raises(CheckpointError, match=r"qweight is torch.int64, not torch.int32"):
        read(scheme_of("gptq", bits=4, group_size=32), parts | {"qweight": parts["qweight"].long()})


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("qweight", (8,), r"up_proj.qweight has shape \[8\].*\(a matrix\)"),
        ("qzeros", (2, 3), r"up_proj.qzeros has shape \[2, 3\].*\(\[2, 2\]\)"),
        ("scales", (3, 16), r"up_proj.scales has shape \[3, 16\].*\(\[2, 16\]\)"),
        ("g_idx", (72,), r"up_proj.weight is \[16, 72\] and group_size 32 does not divide the 72 columns"),
        ("g_idx", (96,), r"up_proj.qweight has shape \[8, 16\].*\(\[12, 16\]\)"),
    ],
)
def test_contradicting_shapes_are_refused(part: str, shape: tuple[int, ...], message: str) -> None:
    parts = gptq_parts(Weights.random(16, 64, 2, 4, True, seed=9), 4, less_one=True)
    shapes = {name: tuple(value.shape) for name, value in parts.items()} | {part: shape}
    with pytest.raises(CheckpointError, match=message):
        scheme_of("gptq", bits=4, group_size=32).format_of(PARAMETER, shapes)


def test_what_is_stored_in_full_stays_ordinary() -> None:
    names = {
        f"model.layers.0.mlp.{part}" for part in ("up.qweight", "up.qzeros", "up.scales", "up.bias", "gate.weight")
    }
    stored = scheme_of("gptq", bits=4, dynamic={"-:.*gate": {}}).stored({*names, "lm_head.weight"})
    parts = {part: f"model.layers.0.mlp.up.{part}" for part in ("qweight", "qzeros", "scales")}
    assert stored == {"model.layers.0.mlp.up.weight": parts}


def test_a_weight_stored_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="up has both qweight and a full weight: remove one"):
        scheme_of("gptq", bits=4).stored({"up.qweight", "up.qzeros", "up.scales", "up.weight"})


def test_a_missing_part_is_refused() -> None:
    with pytest.raises(CheckpointError, match="up has qweight, scales but no qzeros: the checkpoint is incomplete"):
        scheme_of("gptq", bits=4).stored({"up.qweight", "up.scales"})


@given(rows=st.integers(1, 40), columns=st.integers(1, 70), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_int8_of_bitsandbytes_is_read(rows: int, columns: int, dtype: torch.dtype) -> None:
    """bitsandbytes 0.50: functional.py `int8_vectorwise_dequant`."""
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    largest = torch.rand(rows, generator=generator) + 0.1
    scheme = scheme_of("bitsandbytes", load_in_8bit=True, llm_int8_threshold=6.0)
    parts = {"weight": codes, "SCB": largest}
    matrix = read(scheme, parts, dtype)
    assert_reads(matrix, codes.double() * (largest / 127).to(dtype).double().unsqueeze(1))
    assert read(scheme, parts | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, dtype).format == QuantFormat(8)
    with pytest.raises(CheckpointError, match=r"weight_format is 2, not the order of rows \(0\)"):
        read(scheme, parts | {"weight_format": torch.tensor(2, dtype=torch.uint8)}, dtype)
