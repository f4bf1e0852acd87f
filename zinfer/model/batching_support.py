"""The families that can run in ragged batches, and the config options that cannot.

A family that uses transformers' attention interface needs nothing else; the others have an attention forward in
`zinfer.batching.adapters`. Any other family is refused: its output might be wrong without an error.
"""

from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedModel

from zinfer.errors import ConfigError

INTERFACED: Final = frozenset(
    (
        *("cohere", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama"),
        *("mistral", "mixtral", "olmo2", "opt", "phi", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2"),
    )
)
"""Model types whose ragged greedy tokens were verified to equal transformers' `generate` of each prompt alone."""

ADAPTED: Final = frozenset(("bloom", "deepseek_v2", "deepseek_v3", "falcon", "gptj", "mpt"))
"""Model types with an attention forward in `zinfer.batching.adapters`."""

_GROWING: Final = frozenset({"dynamic", "longrope"})
"""Rotary types whose frequencies depend on the longest sequence (transformers, modeling_rope_utils.py)."""


def is_known(model_type: str) -> bool:
    """Whether a model of this type can run in ragged batches."""
    return model_type in INTERFACED or model_type in ADAPTED


def wants_mask(model_type: str) -> bool:
    """Whether the family's code requires an attention mask."""
    return model_type == "mpt"


def check_family(model: PreTrainedModel) -> str:
    """Return the model's type.

    Raises:
        ConfigError: the family, or an option of the model, is not supported in ragged batches.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"a {type(model).__name__} is not a transformers model, whose attention ragged batches need; use "
            "zinfer.init_inference for it"
        )
    config: Any = model.config.get_text_config(decoder=True)
    model_type: str = config.model_type
    if (oddity := _oddity(config)) is not None:
        raise ConfigError(f"this {model_type} model {oddity}; use zinfer.init_inference for it")
    if not is_known(model_type):
        known = ", ".join(sorted(INTERFACED | ADAPTED))
        raise ConfigError(f"a {model_type} model cannot run in ragged batches yet; known are {known}")
    if not model.can_generate():
        raise ConfigError(f"a {type(model).__name__} does not generate; use zinfer.init_inference for its outputs")
    return model_type


def _oddity(config: Any) -> str | None:
    """Return why a batched sequence would get other tokens than alone or in transformers; None if it would not."""
    growing = _rope_types(getattr(config, "rope_parameters", None)) & _GROWING
    if growing:
        kinds = ", ".join(sorted(growing))
        return f"has rotary positions of type {kinds}, which depend on the longest sequence of a batch"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "lets tokens see later ones (use_bidirectional_attention, is_causal), which are not there yet"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"has layers of the kind {', '.join(sorted(others))}, and pages know full and sliding attention"
    if getattr(config, "slow_but_exact", False) and getattr(config, "pretraining_tp", 1) > 1:
        return "sums its projections in slices (slow_but_exact), which is not available in ragged batches"
    return None


def _rope_types(parameters: object) -> set[str]:
    """Return the rotary types of a model, or of each kind of its layers."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))
