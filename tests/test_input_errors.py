"""The errors of products with rounded inputs are those computed in float64, each measured once."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from llm_support import by_ids
from torch import nn
from transformers.pytorch_utils import Conv1D

from zinfer import LLM, SamplingParams
from zinfer.offload.block import Tier
from zinfer.weights.parameter import QuantizedParameter

INT8: dict[str, object] = {"bits": 8, "activations": True}
FP8: dict[str, object] = {"format": "fp8", "activations": True}
MOST_TOKENS = 64


def num_hooks(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) for each in module.modules())


@contextmanager
def true_errors(module: nn.Module) -> Iterator[dict[str, float]]:
    """The errors of the first product of each layer within the block, in float64."""
    found: dict[str, float] = {}

    def watch(name: str) -> Any:
        def compute(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            weight, bias = layer.weight, layer.bias
            if name in found or not isinstance(weight, QuantizedParameter):
                return
            exact = args[0].double() @ (weight.matrix.codes.double() * weight.matrix.scales.double()).T
            rounded = output.double() - (0 if bias is None else bias.double())
            exact, rounded = exact.flatten(0, -2), rounded.flatten(0, -2)
            some = range(0, len(exact), ceil(len(exact) / MOST_TOKENS))
            found[name] = float((rounded[some] - exact[some]).norm() / exact[some].norm())

        return compute

    layers = {name: each for name, each in module.named_modules() if type(each) in (nn.Linear, Conv1D)}
    handles = [layer.register_forward_hook(watch(name), prepend=True) for name, layer in layers.items()]
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_prompts", [2, 40])
@pytest.mark.parametrize("section", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(("family", "home"), [("llama", "none"), ("llama", "nvme"), ("gpt2", "cpu")])
def test_errors_are_those_in_float64(
    family: str, home: str, section: dict[str, object], num_prompts: int, device: str, tmp_path: Path
) -> None:
    tiny_checkpoint(family, tmp_path / "model")
    offload = {"device": home} | ({"nvme_path": str(tmp_path)} if home == "nvme" else {})
    has_head = home == "nvme"  # which is a block of its own, released by a hook on the layer itself
    rules = section | ({"include": ["proj", "lm_head"]} if has_head else {})
    budgets = {"num_slots": 2, "max_weight_memory": 2 * 39_680} if has_head else {}  # two slots of a layer
    config = {"zero_optimization": {"offload_param": offload}, "zinfer": {"quantization": rules, **budgets}}
    prompts = by_ids([[3 + number, 4, 5, 6 + number] for number in range(num_prompts)])
    with LLM(tmp_path / "model", config, device=device, kv_cache_memory="4MB", kernel_inject=True) as llm:
        assert not has_head or llm.plan.homes[-1].tier is Tier.DISK
        module, before = llm._model.module, num_hooks(llm._model.module)
        errors = llm.measure_input_errors()
        with true_errors(module) as wanted:
            llm.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert num_hooks(module) == before, "each layer is measured once"
        found = errors.by_layer()
        assert num_hooks(module) == before
    assert found == pytest.approx(wanted, rel=1e-3)
    assert len(found) == 5 * (7 if family == "llama" else 4) + has_head
    assert all(1e-3 < error < 0.1 for error in found.values())


def test_numbers_that_are_not_finite_have_no_error(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    with LLM(tmp_path, {"zinfer": {"quantization": INT8}}, device="cpu", kv_cache_memory="1MB") as llm:
        errors, spoiled = llm.measure_input_errors(), "model.layers.1.mlp.down_proj"

        def spoil(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            return (args[0] * float("nan"),)

        llm._model.module.get_submodule(spoiled).register_forward_pre_hook(spoil)
        llm.generate(by_ids([[3, 4, 5]]), SamplingParams(max_new_tokens=1))
        found = errors.by_layer()
    assert len(found) == 13
    assert spoiled not in found
