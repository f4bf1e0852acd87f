"""Products of one or two tokens, beside torch's in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn import functional

from zinfer.kernels.gemv import can_multiply, gemv

DTYPES = (torch.float16, torch.bfloat16)
ALLOWED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Rounded once, and by Triton's interpreter towards zero: a place of the dtype, of the largest value."""

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    tokens=st.sampled_from([(), (1,), (1, 1), (2,), (2, 1)]),
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 8, 100, 1023, 1024, 1025, 3000]),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@hypothesis_settings(
    hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_products(
    dtype: torch.dtype, kernel_device: str, tokens: tuple[int, ...], rows: int, columns: int, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(*tokens, 2 * columns).to(dtype).to(kernel_device)[..., columns:]  # vectors lie apart
    weight = torch.randn(rows, columns).to(dtype).to(kernel_device)
    bias = torch.randn(rows).to(dtype).to(kernel_device) if has_bias else None
    assert can_multiply(x, weight)
    found = gemv(x, weight, bias)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == (*tokens, rows)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() <= ALLOWED[dtype] * max(1.0, float(wanted.abs().max()))


def test_columns_of_any_stride(kernel_device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 2).half().to(kernel_device).t(), torch.randn(3, 40).half().to(kernel_device)
    assert torch.equal(gemv(x, weight), gemv(x.contiguous(), weight))


def test_what_the_kernel_does_not_take(kernel_device: str) -> None:
    weight = torch.randn(4, 8, device=kernel_device, dtype=torch.float16)
    x = torch.randn(1, 8, device=kernel_device, dtype=torch.float16)
    assert can_multiply(x, weight)
    assert not can_multiply(x.float(), weight.float())
    assert not can_multiply(x.bfloat16(), weight)
    assert not can_multiply(x.expand(3, 8), weight)
    assert not can_multiply(x[:0], weight)
    assert not can_multiply(x[:, :4], weight.t())
