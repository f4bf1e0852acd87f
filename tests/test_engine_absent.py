"""Between uses an engine's streamed weights are on the meta device, and every use of them says what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_support import NUM_LAYERS, engine, folder, greedy
from engines import engine_for
from torch import nn

import zinfer
from zinfer.absent import AbsentParameter

__all__ = ["engine", "folder"]  # fixtures


def test_a_streamed_parameter_is_meta_between_uses(folder: Path) -> None:
    with engine_for(folder, "disk") as engine:
        for _ in range(2):
            assert all(parameter.is_meta for parameter in engine.module.parameters())
            assert all(tensor.is_meta for tensor in engine.module.state_dict().values())
            greedy(engine)
        shapes = {name: parameter.shape for name, parameter in engine.module.named_parameters()}
        assert shapes["model.layers.0.mlp.up_proj.weight"] == (128, 64)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, weight: weight.sum().item(),
        lambda layer, weight: weight.tolist(),
        lambda layer, weight: torch.ones(64, 64) * weight,
        lambda layer, weight: torch.ones(1, 64) @ weight.T,
        lambda layer, weight: nn.functional.linear(torch.ones(1, 64), weight),
        lambda layer, weight: torch.addmm(torch.zeros(64), torch.ones(1, 64), weight),
        lambda layer, weight: layer.self_attn.q_proj(torch.ones(1, 64)),
        lambda layer, weight: layer.mlp(torch.ones(1, 2, 64)),
    ],
    ids=["item", "tolist", "times", "matmul", "linear", "addmm", "projection", "mlp"],
)
def test_using_a_streamed_parameter_outside_its_block_is_an_error(
    engine: zinfer.InferenceEngine, use: Callable[[nn.Module, torch.Tensor], object]
) -> None:
    """torch's matrix products do not refuse a meta operand on the CPU: they return whatever lies in memory."""
    layer = engine.module.model.layers[NUM_LAYERS - 1]
    weight = layer.self_attn.q_proj.weight
    assert weight.is_meta
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        print(use(layer, weight))


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight @ torch.ones(4, 2),
        lambda weight: weight[torch.tensor([0, 2])],
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: setattr(weight, "data", torch.ones(3, 4)),
        lambda weight: weight.to(torch.float64),
        lambda weight: weight.view(12),
        lambda weight: weight.tolist(),
        lambda weight: weight + 1,
        lambda weight: torch.stack([weight, weight]),
        lambda weight: list(weight),
        lambda weight: weight.data_ptr(),
    ],
    ids=lambda use: str(use.__code__.co_names + tuple(map(str, use.__code__.co_consts[1:]))),
)
def test_less_common_uses_are_errors_too(use: Callable[[AbsentParameter], object]) -> None:
    weight = AbsentParameter.like(torch.ones(3, 4))
    with torch.no_grad(), pytest.raises(RuntimeError, match="there only while its block runs as a part of the model"):
        use(weight)
