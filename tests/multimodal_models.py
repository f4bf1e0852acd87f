"""Tiny random multimodal models, in the layouts in which such models are published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

_TEXT: Final = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_VISION: Final = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
_QWEN: Final = {
    **{"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 14},
    **{"intermediate_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_QWEN_TOKENS: Final = {
    **{"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
}
_IMAGE: Final = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}
_MLA: Final = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}


def _rope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [*section], "rope_theta": 10000.0}}


CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3": {"text_config": {"sliding_window": 8}, "mm_tokens_per_image": 4, **_IMAGE},
    "gemma4": {
        "text_config": {"sliding_window": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
        | {"vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0},
        "vision_config": {"num_key_value_heads": 2, "head_dim": 16},
        **{"image_token_id": 60, "boi_token_id": 61, "eoi_token_id": 62},
    },
    "kimi_k25": {
        "text_config": {**_MLA, "model_type": "deepseek_v3", "head_dim": None},
        **{"image_token_id": 60, "tie_word_embeddings": False},
    },
    "llama4": {
        "text_config": {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 1, "attention_chunk_size": 16},
        "vision_config": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        **_IMAGE,
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 60,
    },
    "minimax_m3_vl": {
        "text_config": {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 64}
        | {"shared_intermediate_size": 32},
        "image_token_id": 60,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral", "head_dim": 16},
        **{"image_token_index": 60, "tie_word_embeddings": False},
    },
    "qwen2_5_vl": {"text_config": _rope(1, 1, 2), "vision_config": _QWEN, **_QWEN_TOKENS},
    "qwen2_vl": {
        "text_config": _rope(1, 1, 2),
        "vision_config": {**_QWEN, "embed_dim": 32},
        **_QWEN_TOKENS,
        "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "text_config": {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"vision_config": _QWEN, **_QWEN_TOKENS},
    },
    "qwen3_vl": {"text_config": _rope(2, 1, 1), "vision_config": _QWEN, **_QWEN_TOKENS},
    "qwen3_vl_moe": {
        "text_config": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **_rope(2, 1, 1)},
        **{"vision_config": _QWEN, **_QWEN_TOKENS},
    },
}
"""What differs from `_TEXT` and `_VISION`, by the type of the model."""


def multimodal_model(kind: str, folder: Path) -> PreTrainedModel:
    """Write a random model as it is published, and return it."""
    own = CONFIGS[kind]
    text = {**_TEXT, **own["text_config"]}
    vision = {**_VISION, **own.get("vision_config", {})}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**own, "text_config": text, "vision_config": vision})
    found: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model: PreTrainedModel = found(config).eval().float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # tied embeddings repeat the last token unless the layers say more
            torch.nn.init.normal_(parameter, std=0.1 if "embed_tokens" in name else 0.5)
    model.save_pretrained(folder)
    if kind == "kimi_k25":  # transformers writes the layers of both sides under the name of one
        path = folder / "model.safetensors"
        renamed = {name.replace("model.blocks.", "model.layers."): value for name, value in load_file(path).items()}
        save_file(renamed, path, {"format": "pt"})
    return model


def text_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of what is used for text, tied weights once."""
    named = model.named_parameters()  # tied ones once
    return sum(each.nbytes for name, each in named if "language_model" in name or name.startswith("lm_head"))
