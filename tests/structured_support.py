"""Shared by tests of structured outputs: a byte-level BPE, a random model for it, and a schema with its check."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "</s>"
_VOCAB_SIZE = 340  # a few more than the tokenizer has, as many models do
_TEXTS = ['{"name": "Zoé", "age": 42, "ok": true, "tags": ["a", "b"]}', "héhé naïve €5 €7 😀😀 yes no maybe"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"type": "boolean"},
        "tag": {"enum": ["x", "yé", None]},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: every byte is a token, and some tokens hold several bytes, not always whole characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=[END, "<pad>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<pad>")


def byte_model(folder: Path, *, seed: int = 0, ends: bool = True) -> Path:
    """A random Llama of one layer and 512 positions, with the tokenizer."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id if ends else None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def check_schema(text: str) -> None:
    """Fail unless the text is JSON of `SCHEMA`."""
    found = json.loads(text)
    assert type(found) is dict
    assert {"name", "age", "ok"} <= set(found) <= set(SCHEMA["properties"]), text
    assert type(found["name"]) is str
    assert len(found["name"]) <= 5, text
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 120
    assert type(found["ok"]) is bool
    assert found.get("tag") in ("x", "yé", None)
