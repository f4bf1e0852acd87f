"""Shared by tests of `zinfer.LLM`: a tiny model, prompts, and transformers' output for each prompt alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint
from transformers import AutoModelForCausalLM

from zinfer import LLM

NUM_NEW = 12
SIZES = [(1, 80, 1), (7, 10, 8), (64, 9, 8), (1000, 64, 16), (50, 1, 128)]
"""Tokens of a pass, pages, tokens of a page: each of them as few as can be somewhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [*random_prompts(9, max_tokens=60), *random_prompts(4, min_tokens=1, max_tokens=1, seed=5)]


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What transformers makes of each prompt by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
        found.append(tuple(ids[0, len(prompt) :].tolist()))
    assert len({token for ids in found for token in ids}) > 20
    return found


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", kv_cache_memory="2MB") as made:
        yield made


def by_ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def token_bytes(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4)
