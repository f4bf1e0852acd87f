"""The text side of a multimodal model: its config, its class and the names of its weights.

A published folder of a model that also sees or hears holds a causal language model beside towers. For text that model
alone computes the same tokens, so it is built from ``text_config``, and the towers' weights are never read.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightTransform

from zinfer.weights import Checkpoint
from zinfer.weights.checkpoint import TOKEN_KEYS, read_config

_SAME: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Text models without a causal class of their own, and those that compute the same of text, with the fields that make
them do so. The three positions of a token of text are equal, so that their rotation (mrope) is the usual one."""
_SIDES: Final = ("text_config", "vision_config", "audio_config", "thinker_config")
"""Keys of config.json that only multimodal models have."""
_TEXT: Final = re.compile(r"(?:model\.)?(?:language_model|text_model|llm)\.")
"""How the names of a text side's weights begin, unless they have the names of a model of text alone."""


def text_side(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the causal language model within a multimodal one; of others the config itself."""
    text: Any = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder:
        return config
    text = _as_same(text) if text.model_type in _SAME else text
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    usual: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    text.architectures = [(usual[0] if isinstance(usual, tuple) else usual).__name__]
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = config.dtype or text.dtype
    for key in TOKEN_KEYS:
        if getattr(text, key, None) is None:
            setattr(text, key, getattr(config, key, None))
    return text


def _as_same(text: PretrainedConfig) -> PretrainedConfig:
    fields = text.to_dict()
    rope = {key: value for key, value in (fields.pop("rope_parameters", None) or {}).items() if "mrope" not in key}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    kind, stated = _SAME[fields.pop("model_type")]
    return CONFIG_MAPPING[kind](**{**fields, **stated, "rope_parameters": rope})


def text_weights(checkpoint: Checkpoint, model: nn.Module) -> Checkpoint:
    """Return the checkpoint with the text side's tensors alone, by the names that a model of text has.

    It is the checkpoint itself unless its config.json describes a multimodal model, and ``model`` is none.
    """
    if not _is_text_of(checkpoint, model):
        return checkpoint
    own = {name.partition(".")[0] for name, _ in model.named_children()}
    is_prefixed = any(_TEXT.match(name) for name in checkpoint.tensors)
    names = {name: new for name in checkpoint.tensors if (new := _text_name(name, own, is_prefixed)) is not None}
    return replace(
        checkpoint,
        tensors={new: replace(checkpoint.tensors[name], name=new) for name, new in names.items()},
        unnamed=frozenset(names[name] for name in checkpoint.unnamed if name in names),
        absent=_renamed(checkpoint.absent, own, is_prefixed),
    )


def has_sides(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint's config.json describes a multimodal model."""
    return not checkpoint.is_listed and any(key in read_config(checkpoint.config_path) for key in _SIDES)


def text_rules(checkpoint: Checkpoint, model: nn.Module) -> list[WeightTransform]:
    """Return the multimodal model's rules for names within its text side, where ``model`` is that of the checkpoint."""
    if not _is_text_of(checkpoint, model):
        return []
    rules = get_checkpoint_conversion_mapping(read_config(checkpoint.config_path)["model_type"]) or []
    # Others place a side in the whole.
    return [rule for rule in rules if not any(pattern.startswith("^") for pattern in rule.source_patterns)]


def _is_text_of(checkpoint: Checkpoint, model: nn.Module) -> bool:
    """Return whether the checkpoint is of a multimodal model, and ``model`` is not."""
    config = getattr(model, "config", None)
    return config is not None and not any(hasattr(config, key) for key in _SIDES) and has_sides(checkpoint)


def _renamed(absent: Mapping[str, str], own: set[str], is_prefixed: bool) -> dict[str, str]:
    return {new: file for name, file in absent.items() if (new := _text_name(name, own, is_prefixed)) is not None}


def _text_name(name: str, own: set[str], is_prefixed: bool) -> str | None:
    """Return a weight's name in the text model; None: it is another side's.

    Args:
        own: names of the text model's modules, such as ``model`` and ``lm_head``.
        is_prefixed: whether names begin as `_TEXT`, but for the head's.
    """
    begin = _TEXT.match(name)
    if begin is not None:
        rest = name[begin.end() :]
        return rest if rest.partition(".")[0] in own else f"model.{rest}"
    first = name.partition(".")[0]
    if first not in own or (is_prefixed and first == "model"):
        return None
    return name
