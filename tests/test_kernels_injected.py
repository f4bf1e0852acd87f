"""The kernels that take the place of what modules write out, beside their references and these beside torch."""

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from zinfer.kernels.activation import (
    ACTIVATIONS,
    Activation,
    activated,
    activated_kernel,
    activated_ref,
    gated,
    gated_kernel,
    gated_ref,
)
from zinfer.kernels.add import added_kernel
from zinfer.kernels.norm import NormKind, norm, norm_kernel, norm_ref
from zinfer.kernels.rotary import rotate, rotate_kernel, rotate_ref

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rounded once, and by Triton's interpreter towards zero: a place of the dtype, of the largest value.
ALLOWED = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    scale = wanted.double().abs().max().clamp(min=1e-3)
    assert (found.double() - wanted.double()).abs().max() <= ALLOWED[found.dtype] * scale


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 8, 100, 128, 300, 1024, 5120]),
    kind=st.sampled_from(["plain", "about 1", "centred", "bias"]),
    seed=st.integers(0, 1 << 20),
)
@hypothesis_settings(
    hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_norms(dtype: torch.dtype, kernel_device: str, rows: int, width: int, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, 2 * width) + 1).to(dtype).to(kernel_device)[:, width:]  # rows lie apart
    weight, bias = (torch.randn(width).to(dtype).to(kernel_device) for _ in range(2))
    how = NormKind(1e-5, offset=float(kind == "about 1"), centred=kind in ("centred", "bias"))
    added = bias if kind == "bias" else None
    found = norm_kernel(x, weight, how, added)
    wanted = norm_ref(x.double(), weight.double(), how, None if added is None else added.double())
    assert_near(found, wanted.to(dtype))


def test_norms_are_those_of_torch_and_transformers() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 5, 48), torch.randn(48), torch.randn(48)
    torch.testing.assert_close(
        norm(x, weight, NormKind(1e-5, centred=True), bias), functional.layer_norm(x, (48,), weight, bias, 1e-5)
    )
    module = modeling_llama.LlamaRMSNorm(48, 1e-6)
    torch.testing.assert_close(norm(x, module.weight, NormKind(1e-6)), module(x))
    half = norm(x.half(), weight.half(), NormKind(1e-5))
    assert (half.double() - norm_ref(x.half().double(), weight.half().double(), NormKind(1e-5))).abs().max() < 2e-3


def test_a_row_that_no_program_holds(kernel_device: str) -> None:
    x, weight = torch.randn(2, 40_000, device=kernel_device), torch.rand(40_000, device=kernel_device)
    torch.testing.assert_close(norm(x, weight, NormKind(1e-6)), norm_ref(x, weight, NormKind(1e-6)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    batch=st.integers(1, 2),
    tokens=st.integers(1, 6),
    heads=st.tuples(st.integers(1, 70), st.integers(1, 9)),
    dim=st.sampled_from([2, 8, 80, 128]),
    interleaved=st.booleans(),
    is_shared=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@hypothesis_settings(
    hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_rotations(
    dtype: torch.dtype,
    kernel_device: str,
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    interleaved: bool,
    is_shared: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    # As attention has them: the heads of a token beside each other, among what else one product makes.
    queries, keys = (
        torch.randn(batch, tokens, count + 1, dim).to(dtype).to(kernel_device)[:, :, 1:].transpose(1, 2)
        for count in heads
    )
    cos, sin = (torch.randn(1 if is_shared else batch, tokens, dim).to(dtype).to(kernel_device) for _ in range(2))
    found = rotate_kernel(queries, keys, cos, sin, interleaved=interleaved)
    wide = [each.double() for each in (queries, keys, cos, sin)]
    for ours, wanted in zip(found, rotate_ref(*wide, interleaved=interleaved), strict=True):
        assert_near(ours, wanted.to(dtype))
        assert ours.transpose(1, 2).is_contiguous()


def test_rotations_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    cos, sin = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    for module, interleaved in ((modeling_llama, False), (modeling_cohere, True)):
        wanted = module.apply_rotary_pos_emb(queries, keys, cos, sin)
        torch.testing.assert_close(rotate(queries, keys, cos, sin, interleaved=interleaved), wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 4), width=st.sampled_from([1, 96, 2048, 5000]), seed=st.integers(0, 1 << 20))
@hypothesis_settings(
    hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_gates_and_activations(
    activation: Activation, dtype: torch.dtype, kernel_device: str, rows: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    both = (4 * torch.randn(rows, 2 * width)).to(dtype).to(kernel_device)
    gate, up = both.chunk(2, dim=-1)
    wanted = gated_ref(gate.double(), up.double(), activation).to(dtype)
    assert_near(gated_kernel(gate, up, activation), wanted)
    assert_near(gated(gate, up, activation), wanted)
    wanted = activated_ref(gate.double(), activation).to(dtype)
    assert_near(activated_kernel(gate, activation), wanted)
    assert_near(activated(gate, activation), wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_is_seen(activation: Activation, kernel_device: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), 1.0], device=kernel_device)
    for found in (activated_kernel(x, activation), gated_kernel(x, torch.ones_like(x), activation)):
        assert found.isfinite().tolist() == [False, False, True]


def test_activations_are_those_of_transformers() -> None:
    x = torch.linspace(-8, 8, 1001)
    names = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_tanh": "gelu_pytorch_tanh",
        "gelu_quick": "quick_gelu",
        "relu": "relu",
    }
    for ours, theirs in names.items():
        torch.testing.assert_close(activated_ref(x, ours), ACT2FN[theirs](x))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1, 1, 300), (3, 700)])
def test_sums(dtype: torch.dtype, kernel_device: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(shape).to(dtype).to(kernel_device) for _ in range(2))
    if kernel_device == "cuda" or dtype == torch.float32:
        assert torch.equal(added_kernel(x, y), x + y)
    else:  # the interpreter rounds towards zero
        assert_near(added_kernel(x, y), (x.double() + y.double()).to(dtype))
    assert added_kernel(x[:0], y[:0]).shape == x[:0].shape
