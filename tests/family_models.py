"""A tiny random model of each class in `zinfer.model.families`, with its inputs and outputs."""

from collections.abc import Mapping
from typing import Any, Final

import ragged_models
import torch
import transformers
from checkpoints import PAD_TOKEN_ID, VOCAB_SIZE, left_padded, random_prompts
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from zinfer.model.families import FAMILIES

Tensors = dict[str, torch.Tensor]

CASES: Final = tuple((family, name) for family in FAMILIES for name in family.classes)

_TEXT: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD_TOKEN_ID,
}
_PAIR: Final = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN_ID,
    "decoder_start_token_id": 2,
}
_T5: Final = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 3,
    "num_heads": 4,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN_ID,
    "decoder_start_token_id": 0,
    "n_positions": 8,  # stated in real ones, and heeded by none
}
_CLIP_TEXT: Final = _TEXT | {"eos_token_id": VOCAB_SIZE - 1, "projection_dim": 32}
_PICTURE: Final = {"image_size": 16, "patch_size": 8, "projection_dim": 32}
_CLIP_PICTURE: Final = {name: _TEXT[name] for name in list(_TEXT)[1:5]} | _PICTURE
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "albert": _TEXT | {"embedding_size": 32},
    "bart": _PAIR | {"max_position_embeddings": 64, "forced_eos_token_id": None},
    "bert": _TEXT,
    "clip": {"text_config": _CLIP_TEXT, "vision_config": _CLIP_PICTURE, "projection_dim": 32},
    "clip_text_model": _CLIP_TEXT,
    "clip_vision_model": _CLIP_PICTURE,
    "distilbert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 64,
        "hidden_dim": 96,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": PAD_TOKEN_ID,
    },
    "electra": _TEXT | {"embedding_size": 32},
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "roberta": _TEXT,
    "t5": _T5,
    "whisper": _PAIR
    | {
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 32,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
_MODEL_TYPES: Final = {"CLIPTextModel": "clip_text_model", "CLIPVisionModel": "clip_vision_model"}


def family_model(model_type: str, class_name: str) -> PreTrainedModel:
    """A float32 model of the class in eval mode."""
    model_type = _MODEL_TYPES.get(class_name, model_type)
    if model_type not in _CONFIGS:
        return ragged_models.tiny_model(model_type)
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **_CONFIGS[model_type])
    model: PreTrainedModel = getattr(transformers, class_name)(config).eval()
    ragged_models.make_loud(model)
    if model_type in ("mt5", "t5") and model.can_generate():
        # As in FLAN-T5's checkpoints, whatever config.json says of ties; with its own embedding a token repeats itself.
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB_SIZE, 64))
    for name, parameter in model.named_parameters():
        if name.endswith("fc2.weight"):  # as in `checkpoints`
            parameter.data.sub_(parameter.data.mean(dim=1, keepdim=True))
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD_TOKEN_ID
    return model


def family_inputs(model: PreTrainedModel, num_rows: int = 3) -> Tensors:
    """What the model is called with: padded rows of mixed lengths, pictures, or sound."""
    generator = torch.Generator().manual_seed(3)
    prompts = random_prompts(num_rows, seed=3)
    ids, mask = left_padded(prompts)
    if not pads_left(model):
        begins = mask.sum(dim=1).tolist()
        ids, mask = (
            torch.stack([row.roll(begin) for row, begin in zip(each, begins, strict=True)]) for each in (ids, mask)
        )
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.main_input_name == "input_features":
        inputs = {"input_features": torch.randn(num_rows, 8, 32, generator=generator)}
    elif model.main_input_name == "pixel_values":
        inputs = {}
    if model.main_input_name == "pixel_values" or hasattr(model, "vision_model"):
        inputs["pixel_values"] = torch.randn(num_rows, 3, 16, 16, generator=generator)
    return inputs


def pads_left(model: PreTrainedModel) -> bool:
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def forward_inputs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """The same for a forward, which an encoder-decoder's tokens so far are handed to."""
    if not model.config.is_encoder_decoder:
        return dict(inputs)
    num_rows = len(next(iter(inputs.values())))
    return dict(inputs) | {"decoder_input_ids": torch.tensor([[2, 7, 90, 33]] * num_rows)}


def outputs_of(found: Any) -> Tensors:
    """All tensors that a forward gave, those of hidden states with their numbers."""
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    several = {name: value for name, value in found.items() if name.endswith("hidden_states")}
    return tensors | {f"{name}.{at}": each for name, states in several.items() for at, each in enumerate(states)}
