"""Activations quantized token by token: the kernel beside its reference, and how far a code is from its value."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from kernel_cases import HALVES

from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.quantize_tokens import quantize_tokens_kernel, quantize_tokens_ref

FLOAT8 = torch.float8_e4m3fn

ARRAYS = numpy_strategies.arrays(
    "float32", st.tuples(st.integers(1, 4), st.integers(1, 50)), elements=st.floats(-(2.0**120), 2.0**120, width=32)
)
# Triton's interpreter rounds 124, which is nearer to 128 than to 112, to 64.
KERNEL_DTYPES = [torch.int8, pytest.param(FLOAT8, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8], ids=str)
@given(values=ARRAYS)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"))
def test_tokens_are_quantized_within_half_a_step(dtype: torch.dtype, values: object) -> None:
    x = torch.as_tensor(values)
    codes, scales = quantize_tokens_ref(x, dtype)
    assert codes.float().abs().max() <= (127 if dtype == torch.int8 else 448)
    assert (codes.float()[x == 0] == 0).all()
    normal = x.abs().amax(dim=1) > 2.0**-100  # smaller ones count as zeros
    wide, step = codes.float().double(), scales.double().unsqueeze(1)
    error = (wide * step - x.double()).abs()
    if dtype == FLOAT8:  # an eighth of the value's power of two, or the least step, 2 ** -9
        step = step * torch.maximum(wide.abs() / 8, torch.full_like(wide, 2.0**-9))
    assert (error <= step * (0.5 + 1e-4))[normal].all()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@given(values=ARRAYS)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"))
def test_the_kernel_equals_the_reference(dtype: torch.dtype, values: object) -> None:
    x = torch.as_tensor(values).to("cpu" if INTERPRETED else "cuda")
    codes, scales = quantize_tokens_kernel(x, dtype)
    wanted_codes, wanted_scales = quantize_tokens_ref(x, dtype)
    assert torch.equal(codes.float(), wanted_codes.float())
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's, of NaN
def test_a_token_that_is_not_finite_has_no_scale(kernel_device: str, dtype: torch.dtype, value: float) -> None:
    x = torch.ones(3, 64, dtype=HALVES[0], device=kernel_device)
    x[1, 5] = value
    for quantize in (quantize_tokens_kernel, quantize_tokens_ref):
        assert quantize(x, dtype)[1].isnan().tolist() == [False, True, False]
