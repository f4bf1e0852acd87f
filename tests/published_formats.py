"""Small random checkpoints in published formats of floats, of the families that are published so.

A format's function makes the stored parts of a matrix [rows, columns] and the values that they stand for, by the
published formula, apart from the code that reads them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from checkpoints import VOCAB_SIZE
from ragged_models import make_loud
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

E4M3: Final = torch.float8_e4m3fn
MAGNITUDES: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Parts = dict[str, torch.Tensor]
Encode = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
_LATENT: Final = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16
}  # fmt: skip
_GROUPS: Final = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3_moe": _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": _EXPERTS | _GROUPS | _LATENT | {"num_key_value_heads": 4, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "intermediate_size": 64},
    "minimax_m2": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "glm4_moe": _EXPERTS | _GROUPS,
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4},
}


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest codes, [rows, columns] uint8."""
    nearest = (values.abs().unsqueeze(-1) - MAGNITUDES).abs().argmin(-1)
    return (nearest + 8 * (values < 0)).to(torch.uint8)


def of_e2m1(codes: torch.Tensor) -> torch.Tensor:
    return MAGNITUDES[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)


def paired(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, that of the even column in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def in_groups(values: torch.Tensor, size: int) -> torch.Tensor:
    """The largest number of each group of columns, [rows, groups]."""
    return values.abs().unflatten(1, (-1, size)).amax(-1)


def powers(values: torch.Tensor, size: int, largest: float) -> torch.Tensor:
    """Bytes of powers of two with which no code is beyond ``largest``."""
    return (in_groups(values, size) / largest).log2().ceil().add(127).to(torch.uint8)


def spread(scales: torch.Tensor, size: int) -> torch.Tensor:
    return scales.float().repeat_interleave(size, 1)


def of_powers(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.float() - 127)


def mxfp4(values: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """OCP Microscaling: as gpt-oss and, under other names, compressed-tensors store it."""
    scales = powers(values, 32, 6)
    each = spread(of_powers(scales), 32)
    codes = e2m1(values / each)
    return {"blocks": paired(codes).unflatten(1, (-1, 16)), "scales": scales}, of_e2m1(codes) * each


@dataclass(frozen=True)
class PublishedFormat:
    """``section`` is quantization_config; ``keeps`` ends names of matrices that are in full precision."""

    section: Mapping[str, Any]
    encode: Encode
    keeps: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "router.weight")
    of_stacks: bool = False
    file: str = "config.json"


FORMATS: Final[dict[str, PublishedFormat]] = {
    "mxfp4": PublishedFormat({"quant_method": "mxfp4"}, mxfp4, of_stacks=True),
}


def write_published(folder: Path, family: str, name: str, **shape: Any) -> PreTrainedModel:
    """A checkpoint in the format; returns transformers' model with the values that it stands for."""
    format = FORMATS[name]
    torch.manual_seed(0)
    made = AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | shape))
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    make_loud(model)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    values = dict(stored)
    for name, value in values.items():
        if format.of_stacks:
            if value.ndim == 3:
                stored |= _stack(stored.pop(name), name, format, values)
        elif value.ndim == 2 and not name.endswith((*format.keeps, "_bias")):
            parts, values[name] = format.encode(stored.pop(name))
            stored |= {f"{name.removesuffix('.weight')}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    full: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    full.generation_config.eos_token_id = None
    text = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    if format.file == "config.json":
        text |= {"quantization_config": dict(format.section)}
    else:
        (folder / format.file).write_text(json.dumps(format.section))
    (folder / "config.json").write_text(json.dumps(text))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return full


def _stack(value: torch.Tensor, name: str, format: PublishedFormat, values: Parts) -> Parts:
    """The parts of the transposes of stacked matrices: the file has output channels in rows."""
    count, columns, rows = value.shape
    parts, read = format.encode(value.transpose(1, 2).reshape(count * rows, columns))
    values[name] = read.view(count, rows, columns).transpose(1, 2).contiguous()
    return {f"{name}_{part}": each.unflatten(0, (count, rows)).contiguous() for part, each in parts.items()}
