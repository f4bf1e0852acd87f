"""GGUF files of tiny random models, written by the package `gguf` as llama.cpp's conversion writes them.

This module shares no code with the tested modules: names come from gguf's own tables, and changes of weights follow
llama.cpp's conversion/*.py. Which value of a model a value of the file becomes is found by converting the numbers of
the model's values too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from ragged_models import make_loud
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE: Final = 300
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_ROUTED: Final = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT: Final = _ROUTED | {
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
}
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
_WINDOW: Final = {"sliding_window": 16}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "llama-3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-biased": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("llama", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2moe", _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 256}),
    "qwen3_moe": ("qwen3moe", _EXPERTS | {"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": []}),
    "gemma2": ("gemma2", _WINDOW | {"tie_word_embeddings": True, "query_pre_attn_scalar": 64}),
    "gemma3_text": (
        "gemma3",
        _WINDOW
        | {
            "num_hidden_layers": 6,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "gpt_oss": (
        "gpt-oss",
        _WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "deepseek_v2": ("deepseek2", _LATENT | {"topk_method": "greedy", "norm_topk_prob": False}),
    "deepseek_v3": (
        "deepseek2",
        _LATENT | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "norm_topk_prob": True},
    ),
    "glm4_moe": ("glm4moe", _ROUTED | {"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
    "minimax_m2": (
        "minimax-m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 32, "intermediate_size": 256},
    ),
}
"""By name: llama.cpp's architecture, and what the config has beside `SHAPE`."""
QUANTIZERS: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16", "BF16", "F32")
_SCALES: Final = {
    "Q2_K": ((80, 0.01), (82, 0.01)),
    "Q3_K": ((108, 3e-3),),
    "Q4_K": ((0, 4e-4), (2, 3e-3)),
    "Q5_K": ((0, 2e-4), (2, 3e-3)),
    "Q6_K": ((208, 1e-4),),
    "IQ4_NL": ((0, 3e-3),),
    "IQ4_XS": ((0, 1e-4),),
}
"""Where the blocks that gguf does not make have their scales, and how large these are in tests."""
TYPES: Final = (*QUANTIZERS, *_SCALES)


def random_blocks(type: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [rows, bytes] of random codes under scales of a usual size."""
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    blocks = rng.integers(0, 256, (rows, columns // values, nbytes), dtype=np.uint8)
    for begin, scale in _SCALES[type]:
        halves = (scale * (0.5 + rng.random((rows, columns // values, 1)))).astype(np.float16)
        blocks[..., begin : begin + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def encoded(values: np.ndarray, type: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a type that stand for values like these, and what they stand for."""
    number = gguf.GGMLQuantizationType[type]
    if type in QUANTIZERS:
        data = gguf.quantize(values, number)
    else:
        data = random_blocks(type, values.size // values.shape[-1], values.shape[-1], rng)
        data = data.reshape(*values.shape[:-1], -1)
    return data, gguf.dequantize(data, number).astype(np.float32).reshape(values.shape)


def tiny_family(family: str) -> PreTrainedModel:
    """A random model of a family in float32."""
    torch.manual_seed(0)
    name = family.partition("-")[0]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **(SHAPE | FAMILIES[family][1])), dtype=torch.float32
    )
    make_loud(model)
    model.generation_config.eos_token_id = None
    return model.eval()


def write_gguf(
    path: Path, family: str, type: str = "Q8_0", *, types: dict[str, str] | None = None, **options: Any
) -> PreTrainedModel:
    """Write a random model of a family; returns it with the values that the file stands for.

    Args:
        type: of all matrices.
        types: of single ones, by a part of their names in the file.
        options: of `gguf.GGUFWriter`, and `tokens`: the kind of a tokenizer, as `add_tokenizer` takes it.
    """
    model, arch = tiny_family(family), FAMILIES[family][0]
    rng, tokens = np.random.default_rng(0), options.pop("tokens", "")
    writer = gguf.GGUFWriter(path, arch, **options)
    add_metadata(writer, model.config)
    if tokens:
        add_tokenizer(writer, tokens)
    state = model.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            numbers = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
            made = (converted(arch, model.config, name, each) for each in (value, numbers))
            pairs = zip(*made, strict=True)
            for (own, part), (_, places) in pairs:
                data = np.ascontiguousarray(part.numpy())
                is_matrix = part.ndim > 1 and own.endswith("weight") and "gate_inp" not in own
                if not is_matrix:
                    writer.add_tensor(own, data.astype(np.float32))
                    continue
                kind = next((other for piece, other in (types or {}).items() if piece in own), type)
                data, values = encoded(data, kind, rng)
                writer.add_tensor(own, data, raw_dtype=gguf.GGMLQuantizationType[kind])
                value.view(-1)[places.flatten().long()] = torch.from_numpy(values).flatten()
    for name, values in extra_tensors(model.config):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's LlamaModel.permute."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def converted(arch: str, config: Any, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file that llama.cpp makes of a parameter."""
    is_numbers = value.dtype == torch.float64
    if arch.startswith("gemma") and name.endswith("norm.weight") and not is_numbers:
        value = value + 1
    if arch == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
        value = permuted(value, config.num_attention_heads)
    if arch == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
        value = permuted(value, config.num_key_value_heads)
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if ".experts." in name:
        yield from converted_experts(arch, f"blk.{layer}", name.rpartition(".")[2], value)
    elif arch == "deepseek2" and "kv_b_proj" in name:
        both = value.view(config.num_attention_heads, -1, value.shape[-1])
        keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield f"blk.{layer}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"blk.{layer}.attn_v_b.weight", values
    elif "e_score_correction_bias" in name:
        yield f"blk.{layer}.exp_probs_b.bias", value
    else:
        if "shared_expert_gate" in name:
            value = value.squeeze(0)
        stem, _, kind = name.rpartition(".")
        if kind == "sinks":
            stem, kind = name, "weight"
        names = gguf.get_tensor_name_map(_arch(arch), config.num_hidden_layers)
        found = names.get_name(stem)
        assert found is not None, name
        yield f"{found}.{kind}", value


def converted_experts(arch: str, layer: str, leaf: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    kind = "bias" if leaf.endswith("_bias") else "weight"
    if arch == "gpt-oss" and kind == "weight":
        value = value.transpose(1, 2)
    if leaf.startswith("down"):
        yield f"{layer}.ffn_down_exps.{kind}", value
        return
    if arch == "gpt-oss":
        gate, up = value[:, ::2], value[:, 1::2]
    else:
        gate, up = value.chunk(2, 1)
    yield f"{layer}.ffn_gate_exps.{kind}", gate
    yield f"{layer}.ffn_up_exps.{kind}", up


def _arch(name: str) -> Any:
    return next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == name)


def rope_of(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def extra_tensors(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's LlamaModel.generate_extra_tensors."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return
    freqs = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for wave in (2 * np.pi / freqs).tolist():
        smooth = (original / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wave < original / high else factor if wave > original / low else between)
    yield "rope_freqs.weight", np.array(found, np.float32)


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """llama.cpp's set_gguf_parameters, of its base and of the models'."""
    arch = writer.arch
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if arch == "deepseek2" else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch not in ("phi3", "deepseek2"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = rope_of(config)
    if arch != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    _add_experts(writer, config)
    _add_attention(writer, config)


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((value for name in names if (value := getattr(config, name, None))), None)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    if (shared := getattr(config, "n_shared_experts", None)) is not None:
        writer.add_expert_shared_count(shared)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
    if config.model_type in ("deepseek_v3", "glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_attention(writer: gguf.GGUFWriter, config: Any) -> None:
    arch = writer.arch
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "phi3":
        writer.add_sliding_window(0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(config.head_dim)
    if arch in ("glm4moe", "minimax-m2"):
        writer.add_rope_dimension_count(int(config.head_dim * rope_of(config)["partial_rotary_factor"]))
    if arch == "deepseek2":
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)


def add_tokenizer(writer: gguf.GGUFWriter, kind: str = "llama-bpe") -> None:
    """A vocabulary of `VOCAB_SIZE` tokens: sentencepiece's, or of bytes with a pre-tokenizer and a chat template."""
    if kind == "sentencepiece":
        add_sentencepiece(writer)
        return
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = list(bytes_to_unicode().values())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n")]
    special = ["<s>", "<pad>", "<|end|>", "<|user|>", "<|bot|>"]
    tokens = [*special, *alphabet, *("".join(pair) for pair in merges)]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), VOCAB_SIZE)]
    kinds = [gguf.TokenType.CONTROL] * len(special)
    kinds += [gguf.TokenType.NORMAL] * (len(alphabet) + len(merges))
    kinds += [gguf.TokenType.UNUSED] * (VOCAB_SIZE - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'bot' }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    words = ["\u2581", *"helo", "\u2581h", "el", "lo", "\u2581hel", "\u2581hello", "  ", "\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), VOCAB_SIZE)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (VOCAB_SIZE - 259)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(number) for number in range(VOCAB_SIZE - 259)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
