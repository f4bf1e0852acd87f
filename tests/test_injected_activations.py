"""Activations that transformers writes out: which are recognised, and that they give what they gave."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu

from zinfer.inject.activations import overlay_activation

WRITTEN_OUT = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python", "quick_gelu")


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu", "silu", "gelu_10", "mish", "relu2", "laplace"])
def test_activations_of_one_kernel_and_others_are_left_alone(name: str) -> None:
    assert overlay_activation(ACT2FN[name]) is None


@pytest.mark.parametrize("module", [*(ACT2FN[name] for name in WRITTEN_OUT), BloomGelu()], ids=[*WRITTEN_OUT, "bloom"])
def test_activations_that_are_written_out_are_recognised(module: torch.nn.Module) -> None:
    overlay, x = overlay_activation(module.eval()), torch.linspace(-9, 9, 101)
    assert overlay is not None
    for each in (x, x.bfloat16(), x.double()):
        atol = 1e-2 if each.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(overlay.forward(each), module(each), rtol=1e-2, atol=atol)
    with torch.autocast("cpu", torch.bfloat16):
        assert overlay.forward(x.bfloat16()).dtype == module(x.bfloat16()).dtype
