"""Modules that `zero_optimization.leaf_module` names are in one block each, and compute the same."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_mixtral
from engines import loaded
from torch import nn

from zinfer.errors import ConfigError

WIDTH = 24


class Stem(nn.Module):
    """Three modules with weights, outside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.norm(self.first(x)).relu())
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tower, self.head = Stem(), Tower(), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.tower(self.stem(x)))
        return found


def config(leaf_module: dict[str, Any]) -> dict[str, Any]:
    zero = {"offload_param": {"device": "cpu"}, "leaf_module": leaf_module}
    return {"zero_optimization": zero, "zinfer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("leaf_module", "num_fewer"),
    [
        ({}, 0),
        ({"classes": ["Stem", "Absent"]}, 2),
        ({"classes": f"{Stem.__module__}.Stem"}, 2),
        ({"names": ["stem"]}, 2),
        ({"name_suffixes": ["tem"], "names": ["tower.layers.1", "tower.layers.2.inner"]}, 2),
    ],
)
def test_a_leaf_is_one_block(leaf_module: dict[str, Any], num_fewer: int) -> None:
    torch.manual_seed(3)
    net, x = Net().eval(), torch.randn(2, WIDTH)
    with torch.no_grad():
        wanted = net(x)
    with loaded(net, config(leaf_module)) as engine:
        assert torch.equal(engine(x), wanted)
        assert sum(engine.stats().blocks_by_home.values()) == 3 + 3 + 1 - num_fewer
        assert len(engine.layers) == 3


def test_experts_are_in_their_layer(tmp_path: Path) -> None:
    tiny_mixtral().save_pretrained(tmp_path)
    found = []
    for leaf_module in ({}, {"classes": ["MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock"]}):
        with loaded(tmp_path, config(leaf_module)) as engine:
            found.append((engine(torch.tensor([[2, 7, 9]])).logits.clone(), engine.stats().blocks_by_home))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_what_has_layers_is_refused_and_what_is_missing_told(caplog: pytest.LogCaptureFixture) -> None:
    said = "leaf_module: tower, a Tower, contains layers, such as tower.layers.0, which stream one by one; name layers"
    for leaf_module, message in (
        ({"classes": ["Tower"]}, said),
        ({"classes": ["Net"]}, "the model itself, a Net, con"),
    ):
        with pytest.raises(ConfigError, match=message), loaded(Net().eval(), config(leaf_module)):
            pass
    missing = {"names": ["stm"], "name_suffixes": ["experts"], "classes": ["Experts"]}
    with caplog.at_level(logging.WARNING), loaded(Net().eval(), config(missing)):
        pass
    told = [record.getMessage() for record in caplog.records if "leaf_module" in record.getMessage()]
    assert told == ["zero_optimization.leaf_module: Net has no module for stm, experts, Experts"]
