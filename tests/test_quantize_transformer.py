"""A module quantized in memory computes what its rounded weights compute, and holds no more than their codes."""

from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import zinfer
from zinfer.errors import CheckpointError, ConfigError
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat
from zinfer.weights.parameter import QuantizedParameter


def logits_of(model: nn.Module) -> torch.Tensor:
    ids, mask = left_padded(random_prompts(4, seed=5))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("arguments", "format"),
    [
        ({}, QuantFormat(8)),
        ({"quant_bits": 4, "quant_type": "asymmetric"}, QuantFormat(4, symmetric=False)),
        ({"quant_bits": 8, "quant_groups": 1}, QuantFormat(8, group_rows=None)),
        ({"quant_bits": 4, "quant_groups": 16}, None),
    ],
)
def test_it_computes_with_the_rounded_weights(family: str, arguments: Any, format: QuantFormat | None) -> None:
    model, expected = tiny_model(family, num_layers=3), tiny_model(family, num_layers=3)
    assert zinfer.quantize_transformer(model, **arguments) is model
    num_quantized = 0
    for (name, module), (_, twin) in zip(model.named_modules(), expected.named_modules(), strict=True):
        if isinstance(module, nn.Linear | Conv1D) and name != "lm_head":
            assert isinstance(module.weight, QuantizedParameter)
            assert module.weight.shape == twin.weight.shape
            assert module.weight.dtype == twin.weight.dtype
            matrix = twin.weight.t() if isinstance(twin, Conv1D) else twin.weight
            rows = matrix.shape[0]
            own = format or QuantFormat(arguments["quant_bits"], group_rows=rows // arguments["quant_groups"])
            values = dequantize_ref(quantize(matrix.detach(), own))
            twin.weight.data = values.t() if isinstance(twin, Conv1D) else values
            num_quantized += 1
    assert num_quantized >= 12
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-4)


def test_what_is_not_a_layers_matrix_stays() -> None:
    model = zinfer.quantize_transformer(tiny_model("llama", num_layers=1))
    kept = [name for name, value in model.named_parameters() if not isinstance(value, QuantizedParameter)]
    assert sorted(kept) == sorted(
        ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        + [f"model.layers.0.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    )


def test_a_quantized_weight_used_in_any_other_way_is_the_full_one() -> None:
    layer = nn.Linear(64, 32)
    full = dequantize_ref(quantize(layer.weight.detach(), QuantFormat(8)))
    weight = zinfer.quantize_transformer(nn.Sequential(layer))[0].weight
    assert torch.equal(weight + 0, full)
    assert torch.equal(weight.t().contiguous(), full.t())
    assert torch.equal(weight[3:5], full[3:5])
    assert torch.equal(torch.nn.functional.normalize(weight), torch.nn.functional.normalize(full))
    assert isinstance(weight.T, QuantizedParameter)
    states = torch.randn(3, 64)
    assert torch.equal(states @ weight.T, torch.nn.functional.linear(states, full))
    assert torch.equal(states[0] @ weight.t(), states[0] @ full.t())
    assert (weight.shape, weight.dtype, weight.numel()) == (full.shape, full.dtype, full.numel())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quant_bits": 3}, "quant_bits must be 4 or 8, not 3"),
        ({"quant_type": "odd"}, "quant_type must be"),
        ({"quant_groups": 0}, "quant_groups must be at least 1, not 0"),
        ({"quant_groups": 7}, r"quant_groups: .*cannot be cut into 7 groups"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zinfer.quantize_transformer(tiny_model("llama", num_layers=1), **arguments)


def test_an_infinite_weight_is_named() -> None:
    model = tiny_model("llama", num_layers=1)
    model.model.layers[0].self_attn.k_proj.weight.data[0, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight cannot.*row 0, column 1"):
        zinfer.quantize_transformer(model)
