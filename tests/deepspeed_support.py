"""The environment of DeepSpeed's examples: one GPU, a seed, and tiny models instead of large ones."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "model"
world_size = int(os.getenv("WORLD_SIZE", "1"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def saved(config: Any, folder: Path) -> Path:
    """A random causal language model beside the demo's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4, **special)
    return saved(config, tmp_path_factory.mktemp("bloom"))
