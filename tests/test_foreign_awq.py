"""AWQ checkpoints hold, once read, exactly the values that their tools read out of them."""

import pytest
import torch
from foreign_support import PARAMETER, Weights, assert_reads, awq_parts, read, scheme_of
from hypothesis import given
from hypothesis import strategies as st

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat


@given(
    words=st.integers(1, 5),
    group_size=st.sampled_from([None, 5, 16, 64, 128]),
    groups=st.integers(1, 4),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 999),
)
def test_values_are_those_of_the_codes(
    words: int, group_size: int | None, groups: int, symmetric: bool, dtype: torch.dtype, seed: int
) -> None:
    groups = groups if group_size else 1
    weights = Weights.random(8 * words, groups * (group_size or 21), groups, 4, symmetric, seed)
    scheme = scheme_of("awq", bits=4, group_size=group_size or -1, zero_point=not symmetric, version="GEMM")
    matrix = read(scheme, awq_parts(weights), dtype)
    assert matrix.format == QuantFormat(4, group_size if groups > 1 else None, symmetric)
    assert_reads(matrix, weights.values(dtype))


def test_reads_on_the_device(device: str) -> None:
    weights = Weights.random(64, 256, 2, 4, False, seed=1)
    matrix = read(scheme_of("awq", bits=4, group_size=128), awq_parts(weights), device=device)
    assert_reads(matrix, weights.values(torch.float16))


def test_symmetric_weights_need_no_zeros() -> None:
    weights = Weights.random(16, 64, 2, 4, True, seed=2)
    parts = awq_parts(weights)
    del parts["qzeros"]
    matrix = read(scheme_of("awq", group_size=32, zero_point=False), parts)
    assert_reads(matrix, weights.values(torch.float16))


def test_zeros_off_the_middle_are_refused_if_the_config_says_symmetric() -> None:
    weights = Weights.random(16, 64, 2, 4, True, seed=3)
    weights.zeros[5, 1] = 3
    with pytest.raises(CheckpointError, match=r"qzeros holds the zero 3, .* symmetric about 8: correct config.json"):
        read(scheme_of("awq", group_size=32, zero_point=False), awq_parts(weights))


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("qweight", (64, 2, 1), r"up_proj.qweight has shape \[64, 2, 1\].*\(a matrix\)"),
        ("qzeros", (1, 2), r"up_proj.qzeros has shape \[1, 2\].*\(\[2, 2\]\)"),
        ("scales", (2, 8), r"up_proj.scales has shape \[2, 8\].*\(\[2, 16\]\)"),
        ("qweight", (65, 2), r"up_proj.weight is \[16, 65\] and group_size 32 does not divide the 65 columns"),
    ],
)
def test_contradicting_shapes_are_refused(part: str, shape: tuple[int, ...], message: str) -> None:
    parts = awq_parts(Weights.random(16, 64, 2, 4, False, seed=4))
    shapes = {name: tuple(value.shape) for name, value in parts.items()} | {part: shape}
    with pytest.raises(CheckpointError, match=message):
        scheme_of("awq", group_size=32).format_of(PARAMETER, shapes)


def test_scaled_activations_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"h.0.mlp.act has scales but no qweight, qzeros"):
        scheme_of("awq").stored({"h.0.mlp.act.scales", "up.qweight", "up.qzeros", "up.scales"})
