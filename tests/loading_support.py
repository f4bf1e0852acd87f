"""Shared by tests of loading: checkpoints, modified copies of them, and their expected logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint
from engines import loaded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, torch.Tensor]
DISK: dict[str, object] = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
HOST: dict[str, object] = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four llama layers in one file."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=4, shards=1)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("sharded"), num_layers=4, shards=3)


@pytest.fixture(scope="module")
def batch() -> Tensors:
    input_ids, attention_mask = left_padded(random_prompts(3, seed=8))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def refused(model: Any, config: Any = None, **kwargs: Any) -> None:
    """For use under `pytest.raises`; an engine that was made all the same is given back."""
    with loaded(model, config, **kwargs):
        pass


def changed(source: Path, target: Path, change: Callable[[Tensors], object], **config: object) -> Path:
    """A copy of a one-file checkpoint with other tensors, and other keys in its config.json."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def keep(tensors: Tensors) -> None:
    """Change nothing."""


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def eager_logits(model: Path | PreTrainedModel, batch: Tensors, **kwargs: Any) -> torch.Tensor:
    loaded = model if isinstance(model, PreTrainedModel) else AutoModelForCausalLM.from_pretrained(model, **kwargs)
    with torch.no_grad():
        logits: torch.Tensor = loaded.eval()(**batch).logits
    return logits


def check_logits(folder: Path, expected: torch.Tensor, batch: Tensors, *configs: dict[str, object]) -> None:
    for config in configs or ({}, HOST, DISK):
        with loaded(folder, config) as engine:
            assert torch.equal(engine(**batch).logits, expected), config
            assert torch.equal(engine(**batch).logits, expected), config
