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
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from ragged_models import make_loud
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

E4M3: Final = torch.float8_e4m3fn
MAGNITUDES: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Parts = dict[str, torch.Tensor]
Encode = Callable[..., tuple[Parts, torch.Tensor]]

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


def unpaired(pairs: torch.Tensor) -> torch.Tensor:
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


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


def nvfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of e4m3, the scale of the second level that they are multiplied with, and the values."""
    outer = values.abs().max() / (6 * 448)
    scales = (in_groups(values, 16) / 6 / outer).clamp(min=2**-9).to(E4M3)
    each = spread(scales, 16) * outer
    codes = e2m1(values / each)
    return paired(codes), scales, outer, of_e2m1(codes) * each


def of_modelopt_nvfp4(values: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, scales, outer, read = nvfp4(values)
    static = {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(0.5)}
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": outer} | static, read


def e4m3(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the values, for scales of the values' shape."""
    codes = (values / scales).clamp(-448, 448).to(E4M3)
    return codes, codes.float() * scales


def of_modelopt_fp8(values: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scale = values.abs().max() / 448
    codes, read = e4m3(values, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, read


def of_mxfp8(values: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scales = powers(values, 32, 448)
    codes, read = e4m3(values, spread(of_powers(scales), 32))
    return {"weight": codes, "weight_scale_inv": scales}, read


def fp8_with_fp4(values: torch.Tensor, name: str) -> tuple[Parts, torch.Tensor]:
    """DeepSeek-V4: blocks of 16 x 16 with powers of two, and experts of e2m1."""
    if ".experts." in name:
        parts, read = mxfp4(values)
        scales = parts["scales"].view(torch.float8_e8m0fnu)
        return {"weight": parts["blocks"].flatten(1).view(torch.int8), "scale": scales}, read
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % 16, 0, -rows % 16))
    largest = padded.abs().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).amax((1, 3))
    scales = torch.exp2((largest / 448).log2().ceil())
    each = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    codes, read = e4m3(values, each)
    return {"weight": codes, "scale": scales.to(torch.float8_e8m0fnu)}, read


def compressed(format: str, **weights: Any) -> "PublishedFormat":
    """What compressed-tensors itself makes of a matrix."""
    args = {"type": "float", "symmetric": True, **weights}
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations, "format": format}
    scheme = QuantizationScheme(**group)

    def encode(values: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        columns = values.shape[1]
        rows, width = {"tensor": (len(values), columns), "channel": (1, columns)}.get(
            weights["strategy"], weights.get("block_structure") or (1, weights.get("group_size"))
        )
        padded = torch.nn.functional.pad(values, (0, -columns % width, 0, -len(values) % rows))
        spans = padded.unflatten(1, (-1, width)).unflatten(0, (-1, rows))
        largest = spans.abs().amax((1, 3))
        scales, outer = largest / (6 if weights["num_bits"] == 4 else 448), None
        state = {"weight": values}
        if "mx" in format:
            scales = torch.exp2(scales.log2().ceil())
        elif format.startswith("nvfp4"):
            outer = (6 * 448 / values.abs().max()).reshape(1)
            scales = (scales * outer).to(E4M3).float()
            state["weight_global_scale"] = outer
        elif weights["strategy"] == "tensor":
            scales = scales.reshape(1)
        parts = BaseCompressor.get_value_from_registry(format).compress(state | {"weight_scale": scales}, scheme)
        each = scales.reshape(-1, 1) if scales.ndim == 1 else scales
        each = each if outer is None else each / outer
        each = each.repeat_interleave(rows, 0)[: len(values)].repeat_interleave(width, 1)[:, :columns]
        packed = parts.get("weight_packed")
        codes = (
            parts["weight"].float()
            if packed is None
            else of_e2m1(torch.stack((packed & 15, packed >> 4), -1).flatten(1))
        )
        kept = {part: each for part, each in parts.items() if each is not None}
        return kept | {"input_scale": torch.tensor([0.5])}, codes * each

    section = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return PublishedFormat(section, encode)


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
    "mxfp8": PublishedFormat({"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head"]}, of_mxfp8),
    "fp8 with fp4 experts": PublishedFormat(
        {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        fp8_with_fp4,
    ),
    "modelopt nvfp4": PublishedFormat(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        of_modelopt_nvfp4,
        file="hf_quant_config.json",
    ),
    "modelopt fp8": PublishedFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, of_modelopt_fp8
    ),
    "compressed mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
    "compressed nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    "compressed mxfp8": compressed("mxfp8-quantized", num_bits=8, strategy="group", group_size=32),
    "compressed fp8 by tensor": compressed("float-quantized", num_bits=8, strategy="tensor"),
    "compressed fp8 by channel": compressed("float-quantized", num_bits=8, strategy="channel"),
    "compressed fp8 in blocks": compressed("float-quantized", num_bits=8, strategy="block", block_structure=[16, 32]),
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
            of_name = (name,) if format.encode is fp8_with_fp4 else ()
            parts, values[name] = format.encode(stored.pop(name), *of_name)
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
