"""compressed-tensors checkpoints hold, once read, exactly the values that the library reads out of them."""

import logging
from itertools import product
from typing import Any

import pytest
import torch
from foreign_support import (
    MODULE,
    PARAMETER,
    Weights,
    assert_reads,
    packed_parts,
    packed_scheme,
    plain_parts,
    read,
    scheme_of,
)
from hypothesis import given
from hypothesis import strategies as st

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 40),
    group_size=st.sampled_from([None, 6, 32, 128]),
    groups=st.integers(1, 4),
    symmetric=st.booleans(),
    packed=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 999),
)
def test_integers_by_channel_and_group(
    bits: int,
    rows: int,
    group_size: int | None,
    groups: int,
    symmetric: bool,
    packed: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    groups = groups if group_size else 1
    weights = Weights.random(rows, groups * (group_size or 48), groups, bits, symmetric, seed)
    parts = (packed_parts if packed else plain_parts)(weights, bits, symmetric=symmetric)
    scale = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    scheme = packed_scheme(bits, format="pack-quantized" if packed else "int-quantized", symmetric=symmetric, **scale)
    matrix = read(scheme, parts, dtype)
    assert matrix.format == QuantFormat(4 if bits == 4 else 8, group_size, symmetric)
    assert_reads(matrix, weights.values(dtype))


@given(
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    packed=st.booleans(),
    shape=st.sampled_from([(), (1,), (1, 1)]),
    dtype=DTYPES,
    seed=st.integers(0, 999),
)
def test_integers_by_tensor(
    bits: int, symmetric: bool, packed: bool, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    many = Weights.random(12, 32, 1, bits, symmetric, seed)
    weights = Weights(many.codes, many.zeros[:1], many.scales[:1])
    parts = plain_parts(weights, bits, symmetric=symmetric)
    if packed:
        parts |= packed_parts(weights, bits, symmetric=True)
        del parts["weight"]
    for part in parts.keys() & {"weight_scale", "weight_zero_point"}:
        parts[part] = parts[part].reshape(shape)
    format = "pack-quantized" if packed else "int-quantized"
    matrix = read(packed_scheme(bits, format=format, strategy="tensor", symmetric=symmetric), parts, dtype)
    assert matrix.format == QuantFormat(4 if bits == 4 else 8, None, symmetric, group_rows=None)
    assert_reads(matrix, weights.values(dtype))


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (24, 1)),
        ({"strategy": "group", "group_size": 32}, (24, 3)),
        ({"strategy": "block", "block_structure": [8, 32]}, (3, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_floats(strategy: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """compressed-tensors 0.20: compressors/naive_quantized/base.py, and for blocks quantization/lifecycle/
    forward_helpers.py `_process_block`."""
    generator = torch.Generator().manual_seed(5)
    codes = (torch.randn(24, 96, generator=generator) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=generator) * 0.1 + 1e-3
    matrix = read(float_scheme(strategy), {"weight": codes, "weight_scale": scales}, dtype)
    grid = scales.to(torch.float64).reshape(shape if len(shape) == 2 else (1, 1))
    spread = grid.repeat_interleave(24 // grid.shape[0], 0).repeat_interleave(96 // grid.shape[1], 1)
    assert matrix.format.is_float
    assert_reads(matrix, codes.to(torch.float64) * spread)


def float_scheme(strategy: dict[str, Any]) -> Any:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **strategy}}
    return scheme_of("compressed-tensors", format="float-quantized", config_groups={"group_0": group})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("packed", [True, False])
def test_reads_on_the_device(device: str, bits: int, packed: bool) -> None:
    weights = Weights.random(64, 256, 2, bits, False, seed=1)
    parts = (packed_parts if packed else plain_parts)(weights, bits, symmetric=False)
    format = "pack-quantized" if packed else "int-quantized"
    scheme = packed_scheme(bits, format=format, strategy="group", group_size=128, symmetric=False)
    assert_reads(read(scheme, parts, device=device), weights.values(torch.float16))


def test_zero_points_of_older_versions_are_not_packed() -> None:
    """compressed-tensors 0.6: compressors/pack_quantized.py packs the weight alone."""
    weights = Weights.random(16, 64, 2, 4, False, seed=2)
    zeros = plain_parts(weights, 4, symmetric=False)["weight_zero_point"]
    parts = packed_parts(weights, 4, symmetric=False) | {"weight_zero_point": zeros}
    scheme = packed_scheme(4, strategy="group", group_size=32, symmetric=False)
    assert_reads(read(scheme, parts), weights.values(torch.float16))


INTEGERS = product(["pack-quantized", "int-quantized"], [4, 8], [True, False], ["tensor", "channel", "group"])
FLOATS = product(["float-quantized"], [8], [True], ["tensor", "channel", "group", "block"])


@pytest.mark.parametrize(("format", "bits", "symmetric", "strategy"), [*INTEGERS, *FLOATS])
def test_what_the_library_compresses_is_read(format: str, bits: int, symmetric: bool, strategy: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    fields: dict[str, Any] = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy}
    extents: dict[str, dict[str, Any]] = {"group": {"group_size": 32}, "block": {"block_structure": [8, 32]}}
    fields |= extents.get(strategy, {})
    fields |= {"type": "float" if format == "float-quantized" else "int"}
    group = QuantizationScheme(targets=["Linear"], weights=fields, format=format)
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(6))
    rows, columns = {"tensor": (24, 96), "channel": (1, 96), "group": (1, 32), "block": (8, 32)}[strategy]
    spans = weight.view(24 // rows, rows, 96 // columns, columns)
    scales, zeros = calculate_qparams(spans.amin((1, 3)), spans.amax((1, 3)), group.weights)
    shape = (1,) if strategy == "tensor" else scales.shape
    state = {"weight": weight, "weight_scale": scales.view(shape), "weight_zero_point": zeros.view(shape)}
    library = BaseCompressor.get_value_from_registry(format)
    parts = library.compress(state, group)
    config = {"quantization_status": "compressed", "config_groups": {"group_0": group.model_dump()}}
    matrix = read(scheme_of("compressed-tensors", format=format, **config), parts, torch.float32)
    assert_reads(matrix, library.decompress(parts, group)["weight"].to(torch.float64))


def test_each_module_is_read_as_its_group_says() -> None:
    def group(bits: int, *targets: str, **more: object) -> dict[str, object]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}, **more}

    groups = {
        "all": group(4, "Linear"),
        "some": group(8, "re:.*down"),
        "one": group(8, "mlp.0.down", format="int-quantized"),
    }
    scheme = scheme_of("compressed-tensors", format="pack-quantized", config_groups=groups)
    shapes: dict[str, tuple[int, ...]] = {"weight_packed": (6, 4), "weight_shape": (2,), "weight_scale": (6, 1)}
    assert scheme.format_of("mlp.0.up.weight", shapes) == (QuantFormat(4), 6, 32)
    assert scheme.format_of("mlp.1.down.weight", shapes) == (QuantFormat(8), 6, 16)
    plain: dict[str, tuple[int, ...]] = {"weight": (6, 16), "weight_scale": (6, 1)}
    assert scheme.format_of("mlp.0.down.weight", plain) == (QuantFormat(8), 6, 16)
    names = {"mlp.0.down.weight", "mlp.0.down.weight_scale", "lm_head.weight"}
    assert scheme.stored(names) == {
        "mlp.0.down.weight": {"weight": "mlp.0.down.weight", "weight_scale": "mlp.0.down.weight_scale"}
    }


def test_a_module_of_no_group_is_refused() -> None:
    weights = {"num_bits": 4, "strategy": "channel"}
    groups = {name: {"targets": [f"re:.*{name}"], "weights": weights} for name in ("up", "down")}
    scheme = scheme_of("compressed-tensors", format="pack-quantized", config_groups=groups)
    with pytest.raises(CheckpointError, match="gate is quantized, but no group in quantization_config"):
        scheme.stored({"gate.weight_packed", "gate.weight_shape", "gate.weight_scale"})


def test_dynamic_activations_are_left_in_full_precision(caplog: pytest.LogCaptureFixture) -> None:
    weights = Weights.random(8, 32, 1, 8, True, seed=3)
    activations = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": {"strategy": "channel"}, "input_activations": activations}
    with caplog.at_level(logging.WARNING):
        scheme = scheme_of("compressed-tensors", format="int-quantized", config_groups={"group_0": group})
    assert "quantization_config.config_groups.group_0.input_activations asks for quantized activations" in caplog.text
    assert_reads(read(scheme, plain_parts(weights, 8, symmetric=True)), weights.values(torch.float16))


def test_static_scales_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """Llama-3.1-405B-FP8 and others of one scale for all of a layer's inputs, with scales of the KV cache."""
    activations = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    groups = {"group_0": {**group, "input_activations": activations}}
    scheme = scheme_of(
        "compressed-tensors", format="float-quantized", config_groups=groups, kv_cache_scheme=activations
    )
    names = [f"{MODULE}.{part}" for part in ("weight", "weight_scale", "input_scale")] + ["self_attn.k_scale"]
    with caplog.at_level(logging.WARNING):
        assert sorted(scheme.set_aside(names)) == sorted(names[2:])
    assert f"(2 tensors, {MODULE}.input_scale the first): they are not read" in caplog.text
    assert scheme.stored(names) == {PARAMETER: {"weight": names[0], "weight_scale": names[1]}}


def test_activation_order_is_read_by_the_index_of_groups() -> None:
    weights = Weights.random(16, 64, 2, 4, True, seed=4)
    scheme = packed_scheme(4, strategy="group", group_size=32, actorder="group")
    parts = packed_parts(weights, 4, symmetric=True)
    with pytest.raises(CheckpointError, match="but no weight_g_idx"):
        read(scheme, parts)
    for held in (weights, weights.scattered(seed=1)):
        parts["weight_g_idx"] = held.group_index.clone()
        assert_reads(read(scheme, parts), held.values(torch.float16))
    parts["weight_g_idx"].copy_(weights.group_index)[40] = 0
    with pytest.raises(CheckpointError, match="weight_g_idx puts 33 columns into group 0, but group_size is 32"):
        read(scheme, parts)


def test_rows_that_do_not_fill_their_words_are_refused() -> None:
    """Without groups the number of columns is in the data alone."""
    parts = packed_parts(Weights.random(4, 13, 1, 4, True, seed=5), 4, symmetric=True)
    with pytest.raises(
        CheckpointError, match=r"weight_shape is \[4, 13\], but the packed weight has room for \[4, 16\]"
    ):
        read(packed_scheme(4, strategy="channel"), parts)


def test_codes_beyond_their_bits_are_refused() -> None:
    parts = plain_parts(Weights.random(8, 32, 1, 8, True, seed=6), 8, symmetric=True)
    with pytest.raises(CheckpointError, match=r"weight holds codes from -1\d\d to 1\d\d, .* 4 bits: correct num_bits"):
        read(packed_scheme(4, format="int-quantized", strategy="channel"), parts)


def test_floats_where_integers_belong_are_refused() -> None:
    parts = plain_parts(Weights.random(8, 32, 1, 8, True, seed=7), 8, symmetric=True)
    parts["weight"] = parts["weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"weight is torch.float8_e4m3fn, not torch.int8"):
        read(packed_scheme(8, format="int-quantized", strategy="channel"), parts)


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("weight_packed", (16, 9), r"up_proj.weight_packed has shape \[16, 9\].*\(\[16, 8\]\)"),
        ("weight_scale", (8, 2), r"up_proj.weight_scale has shape \[8, 2\].*\(\[16, 2\]\)"),
        ("weight_zero_point", (3, 2), r"up_proj.weight_zero_point has shape \[3, 2\].*\(\[2, 2\] or \[16, 2\]\)"),
        ("weight_shape", (3,), r"up_proj.weight_shape has shape \[3\].*\(\[2\]\)"),
    ],
)
def test_contradicting_shapes_are_refused(part: str, shape: tuple[int, ...], message: str) -> None:
    parts = packed_parts(Weights.random(16, 64, 2, 4, False, seed=8), 4, symmetric=False)
    shapes = {name: tuple(value.shape) for name, value in parts.items()} | {part: shape}
    scheme = packed_scheme(4, strategy="group", group_size=32, symmetric=False)
    with pytest.raises(CheckpointError, match=message):
        scheme.format_of(PARAMETER, shapes)


def test_ragged_groups_are_refused() -> None:
    grouped = packed_scheme(8, format="int-quantized", strategy="group", group_size=32)
    with pytest.raises(
        CheckpointError, match=r"is \[16, 65\] and group_size 32 does not divide the 65 columns: ragged"
    ):
        grouped.format_of(PARAMETER, {"weight": (16, 65), "weight_scale": (16, 3)})


def test_columns_of_a_matrix_are_planned_without_data() -> None:
    scheme = packed_scheme(4, strategy="group", group_size=6)
    format, rows, columns = scheme.format_of(
        PARAMETER, {"weight_packed": (5, 3), "weight_shape": (2,), "weight_scale": (5, 3)}
    )
    assert (format, rows, columns) == (QuantFormat(4, 6), 5, 18)
    assert QuantizedMatrix.empty(format, rows, columns, torch.float16, "cpu").nbytes == 5 * 9 + 5 * 3 * 2
