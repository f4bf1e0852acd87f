"""Shared by tests of placement: one model, its sizes, and plans for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint
from engines import blocks_of, loaded
from transformers import AutoModelForCausalLM

from zinfer.planning.placement import Plan

NUM_LAYERS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, shards=2)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(2, seed=2))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.fixture(scope="module")
def expected(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


@pytest.fixture(scope="module")
def total_bytes(folder: Path) -> int:
    return sum(block.nbytes for block in blocks_of(folder))


@pytest.fixture(scope="module")
def layer_bytes(folder: Path) -> int:
    return max(block.nbytes for block in blocks_of(folder))


@pytest.fixture(scope="module")
def small_bytes(total_bytes: int, layer_bytes: int) -> int:
    """Embedding, norm and head together."""
    return total_bytes - NUM_LAYERS * layer_bytes


def plan_of(model: Any, config: Any = None, **kwargs: Any) -> Plan:
    with loaded(model, config, **kwargs) as engine:
        return engine.plan


def offload(device: str, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": device, **keys}}}


def zero(**keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, **keys}}
