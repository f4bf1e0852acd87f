"""Shared by the engine's tests: a tiny model, an engine for each home, and inputs for them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint
from engines import engine_for
from transformers import AutoModelForCausalLM, PreTrainedModel

import zinfer
from zinfer.offload.stats import RunStats

Tensors = dict[str, torch.Tensor]
STREAMED = ("host", "disk", "mixed")
NUM_LAYERS = 5
PROMPT = torch.tensor([[5, 17, 40, 99, 3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, shards=2)


@pytest.fixture(scope="module")
def eager(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model


@pytest.fixture(scope="module")
def batch() -> Tensors:
    input_ids, attention_mask = left_padded(random_prompts(4, seed=12))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.fixture(scope="module", params=STREAMED)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[zinfer.InferenceEngine]:
    """One engine for many tests: what a test does to it must not show in the next."""
    with engine_for(folder, request.param, 3) as made:
        yield made


@pytest.fixture(scope="module")
def resident(folder: Path) -> Iterator[zinfer.InferenceEngine]:
    with engine_for(folder, "resident") as made:
        yield made


def greedy(model: Any, **kwargs: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(**({"input_ids": PROMPT, "max_new_tokens": 10, "do_sample": False} | kwargs))
    return tokens


def logits_of(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**(kwargs or {"input_ids": PROMPT})).logits
    return logits


def moved(engine: zinfer.InferenceEngine) -> tuple[int, int, int]:
    stats = settled(engine)
    return stats.bytes_read_disk, stats.bytes_to_device, stats.passes


def settled(engine: zinfer.InferenceEngine) -> RunStats:
    """The counters once the moves ahead for the next pass are done."""
    stats = engine.stats()
    while True:
        time.sleep(0.03)
        later = engine.stats()
        if later.bytes_to_device == stats.bytes_to_device and later.bytes_read_disk == stats.bytes_read_disk:
            return later
        stats = later


class Raised(Exception):
    """What a test's hook raises."""
