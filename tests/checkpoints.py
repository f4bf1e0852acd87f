"""Checkpoints for tests: tiny random models of each family, written by transformers, and single safetensors files.

The weights are large on purpose (matrices with a standard deviation of 0.3): a model with small weights repeats one
token whatever its layers compute, and a parity test on it cannot fail.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

FAMILIES = ("llama", "opt", "gpt2", "qwen2", "mistral")
VOCAB_SIZE = 131
HIDDEN_SIZE = 64
MAX_POSITIONS = 128
# Shorter than most of a test's texts, so that mistral's window shows; without it the family would be llama again.
SLIDING_WINDOW = 16
PAD_TOKEN_ID = 1
MATRIX_STD = 0.3
POSITION_STD = 1.0
BIAS_STD = 0.1
NORM_STD = 0.1
FRAGMENT_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": MATRIX_STD / 2,
}
"""Of a small decoder whose matrices can lie in the order of fragments."""

Family = tuple[type[PreTrainedModel], type[PreTrainedConfig]]
_CLASSES: dict[str, Family] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "opt": (OPTForCausalLM, OPTConfig),
    "gpt2": (GPT2LMHeadModel, GPT2Config),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "mistral": (MistralForCausalLM, MistralConfig),
}


def tiny_checkpoint(
    family: str,
    folder: Path,
    *,
    num_layers: int = 5,
    dtype: torch.dtype = torch.float32,
    shards: int = 2,
    tie: bool | None = None,
    seed: int = 0,
) -> Path:
    """Writes a random model of `family` into `folder`, in at least `shards` safetensors files, and returns the folder.

    Equal arguments give equal bytes. Tokens are 0 .. 130, prompts and outputs have at most 128 together, 1 pads, and no
    token ends a text. `tie` says whether head and embedding are one; None leaves it to the family's own habit.
    """
    model = tiny_model(family, num_layers=num_layers, tie=tie, seed=seed).to(dtype)
    nbytes = sum(tensor.nbytes for tensor in model.parameters())
    limit_bytes = nbytes // shards
    while True:
        model.save_pretrained(folder, max_shard_size=limit_bytes)
        num_files = len(list(folder.glob("*.safetensors")))
        if num_files >= shards:
            return folder
        # Each tensor lies whole in one file, so an even share may leave too few files.
        limit_bytes = limit_bytes * 3 // 4
        assert limit_bytes > 0, f"{shards} files are more than the {family} model has tensors"


def tiny_model(family: str, *, num_layers: int = 5, tie: bool | None = None, seed: int = 0) -> PreTrainedModel:
    """The float32 model that `tiny_checkpoint` writes, in memory and in eval mode."""
    model_class, config_class = _CLASSES[family]
    tied = {} if tie is None else {"tie_word_embeddings": tie}
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": PAD_TOKEN_ID}
    config = config_class(**_shape(family, num_layers), **tied, **special)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    return model


def tiny_mixtral(seed: int = 0) -> MixtralForCausalLM:
    """Two layers of four experts, whose matrices lie one below the other in one parameter."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        num_local_experts=4,
        initializer_range=MATRIX_STD,
    )
    return MixtralForCausalLM(config).eval()


def wide_llama(folder: Path, num_layers: int) -> Path:
    """A checkpoint of layers of 13.6 MB (float32), in files of at most 100 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        vocab_size=VOCAB_SIZE,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100MB")
    return folder


def random_prompts(num_prompts: int, *, min_tokens: int = 3, max_tokens: int = 17, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths over the tiny vocabulary, without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(num_prompts):
        num_tokens = int(torch.randint(min_tokens, max_tokens + 1, (), generator=generator))
        prompts.append(torch.randint(PAD_TOKEN_ID + 1, VOCAB_SIZE, (num_tokens,), generator=generator).tolist())
    return prompts


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `attention_mask`, both [prompts, longest], the padding on the left."""
    longest = max(map(len, prompts))
    rows = [[PAD_TOKEN_ID] * (longest - len(prompt)) + prompt for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(masks)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Writes `tensors` to one file with the reference library and returns its path."""
    save_file(dict(tensors), path, metadata=metadata)
    return path


def _shape(family: str, num_layers: int) -> dict[str, int]:
    if family == "gpt2":
        return {
            "vocab_size": VOCAB_SIZE,
            "n_positions": MAX_POSITIONS,
            "n_embd": HIDDEN_SIZE,
            "n_layer": num_layers,
            "n_head": 4,
        }
    shape = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
    }
    if family == "opt":
        return shape | {"ffn_dim": 2 * HIDDEN_SIZE, "word_embed_proj_dim": HIDDEN_SIZE}
    grouped = shape | {"intermediate_size": 2 * HIDDEN_SIZE, "num_key_value_heads": 2}
    return grouped | {"sliding_window": SLIDING_WINDOW} if family == "mistral" else grouped


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith(".bias"):
        parameter.normal_(0.0, BIAS_STD, generator=generator)
    elif parameter.ndim == 1:
        parameter.normal_(1.0, NORM_STD, generator=generator)
    else:
        std = POSITION_STD if name.endswith(("embed_positions.weight", "wpe.weight")) else MATRIX_STD
        parameter.normal_(0.0, std, generator=generator)
    # ReLU and GELU put out mostly positive numbers; without this their mean, the same for every token, drowns what the
    # tokens say and some seeds repeat one forever. GPT-2's Conv1D holds its weight transposed.
    if name.endswith("fc2.weight"):
        parameter.sub_(parameter.mean(dim=1, keepdim=True))
    elif name.endswith("mlp.c_proj.weight"):
        parameter.sub_(parameter.mean(dim=0, keepdim=True))
