"""Makes random models of any shape in host memory, quickly; all streaming figures are measured with them."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, PreTrainedModel


def opt_config(num_layers: int, hidden_size: int) -> OPTConfig:
    """OPT's own proportions (Zhang et al. 2022, table 1): heads of 128, a feed-forward four times as wide."""
    return OPTConfig(
        hidden_size=hidden_size,
        ffn_dim=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 128,
        word_embed_proj_dim=hidden_size,
        vocab_size=50272,
        max_position_embeddings=2048,
    )


def llama_config(num_layers: int) -> LlamaConfig:
    """Llama-3-70B's widths: 64 heads of 128 over 8 of keys and values, a gated feed-forward of 28,672."""
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=num_layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


def layer_params(config: PretrainedConfig) -> int:
    """Parameters of all layers' matrices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".layers." in name and parameter.dim() > 1
    )


def random_opt(num_layers: int, hidden_size: int, dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
    """`random_model` of OPT's shape."""
    return random_model(opt_config(num_layers, hidden_size), dtype, device, seed)


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
    """A model on the CPU with matrices of standard deviation 0.02, drawn on ``device``; buffers are not filled."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config).to(dtype)
    model: PreTrainedModel = empty.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            drawn = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
            parameter.data.copy_(drawn)
        else:
            parameter.data.fill_(1 if "norm" in name and name.endswith("weight") else 0)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def save_random_opt(folder: Path, num_layers: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    """`save_random` of OPT's shape."""
    save_random(folder, opt_config(num_layers, hidden_size), dtype, device)


def save_random(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: str) -> None:
    """Write a random model as safetensors, all of it on the disk and none of it in the page cache afterwards."""
    random_model(config, dtype, device).save_pretrained(folder, max_shard_size="5GB")
    drop_page_cache(folder)


def drop_page_cache(folder: Path) -> None:
    """Write the folder's files out and take them off the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
