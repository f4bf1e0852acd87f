#!/usr/bin/env python3
"""Writes a random Llama checkpoint of any size, shard by shard, without ever holding the model in memory.

    python scripts/make_random_checkpoint.py OUT --hidden 2048 --layers 14 [--dtype float32] [--tokenizer FOLDER]

Matrices have a standard deviation of 0.3 / sqrt(hidden / 64), so that the logits keep a fair spread at any width.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or 4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 256),
        vocab_size=args.vocab,
        max_position_embeddings=2048,
        dtype=args.dtype,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def shards(shapes: dict[str, torch.Size], shard_bytes: int, dtype: torch.dtype) -> Iterator[list[str]]:
    """Names in the model's order, cut where the next tensor would exceed the shard's size."""
    names: list[str] = []
    nbytes = 0
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        if names and nbytes + size > shard_bytes:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += size
    yield names


def write_checkpoint(out: Path, args: argparse.Namespace) -> int:
    """Write config, shards and index; returns the bytes of weights."""
    config = llama_config(args)
    dtype = getattr(torch, args.dtype)
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(args.seed)
    std = 0.3 / (args.hidden / 64) ** 0.5
    out.mkdir(parents=True, exist_ok=True)
    parts = list(shards(shapes, args.shard_mb * 1_000_000, dtype))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: random_tensor(shapes[name], std, generator).to(dtype) for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
    return total


def random_tensor(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).normal_(0, std, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--shard-mb", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer files are copied along")
    args = parser.parse_args()
    total = write_checkpoint(args.out, args)
    if args.tokenizer:
        for name in TOKENIZER_FILES:
            if (args.tokenizer / name).is_file():
                shutil.copy(args.tokenizer / name, args.out / name)
    print(f"{args.out}: {total / 1e9:.2f} GB of {args.dtype} weights")


if __name__ == "__main__":
    main()
