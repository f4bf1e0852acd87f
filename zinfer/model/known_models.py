"""Shapes of published models, to plan for them without a folder."""

from collections.abc import Mapping
from typing import Any, Final


def _llama(layers: int, width: int, feed_forward: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": positions,
    }


def _opt(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "dtype": "float16",
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "word_embed_proj_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


KNOWN_MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8192),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8192),
    "llama-3.1-405b": _llama(126, 16384, 53248, 128, 131072),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "mixtral-8x22b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32768,
        "max_position_embeddings": 65536,
        "sliding_window": None,
    },
    "qwen3-235b-a22b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
}
"""The published config.json by name, without the fields that a plan does not read.

DeepSeek-V3 is published in FP8 blocks; here its weights are bfloat16, or as ``zinfer.quantization`` says.
"""
