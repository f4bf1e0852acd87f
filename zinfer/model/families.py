"""The model families that are tested, the features each supports, and which of them run in ragged batches.

A family that uses transformers' attention interface needs nothing else to run in ragged batches; the others have an
attention forward in `zinfer.batching.adapters`. Any other is refused: its output might be wrong without an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.model.sharding.plans import divides_experts, is_divided

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


_RMS: Final = "RMS norm"
_HALVES: Final = "rotation by halves"
_SILU, _GELU = "gated MLP, silu", "gated MLP, gelu_tanh"
_GROUPED: Final = "grouped experts"
_EXPERTS: Final = ("gated experts, silu", _GROUPED)
_ACTIVATION: Final = "activation, gelu_tanh"


_MODELS: Final = {
    "cohere": "Command R, Aya 23",
    "gemma": "Gemma 1",
    "glm4": "GLM-4-0414",
    "gpt_neox": "GPT-NeoX-20B, Pythia",
    "granite": "Granite 3",
    "llama": "Llama 1 to 3.3",
    "mistral": "Mistral 7B, Nemo",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "phi": "Phi-1 to Phi-2",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen 2, 2.5, QwQ",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 30B-A3B, 235B",
}
"""The models as people call them, of families whose own name does not say it."""


@dataclass(frozen=True)
class Family:
    """One family. All of them stream under `zinfer.init_inference`.

    Attributes:
        name: its usual name.
        model_type: the `model_type` in config.json, of the first class.
        classes: the tested transformers classes that `architectures` may name.
        fused: its fused kernels, as in `InferenceEngine.injected`, without the products of linear layers.
    """

    name: str
    model_type: str
    classes: tuple[str, ...]
    fused: tuple[str, ...] = ()

    @property
    def models(self) -> str:
        """Its published models as people call them."""
        return _MODELS.get(self.model_type, self.name)

    @property
    def is_batched(self) -> bool:
        """Whether `zinfer.LLM` and jobs run it by continuous batching."""
        return is_known(self.model_type)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether its layers can be divided among ranks."""
        return is_divided(self.model_type)

    @property
    def is_expert_parallel(self) -> bool:
        """Whether its experts can be divided among ranks by number."""
        return divides_experts(self.model_type)


def _causal(name: str, model_type: str, model_class: str, *fused: str) -> Family:
    return Family(name, model_type, (f"{model_class}ForCausalLM",), fused)


FAMILIES: Final = (
    Family("ALBERT", "albert", ("AlbertModel", "AlbertForMaskedLM", "AlbertForSequenceClassification"), (_ACTIVATION,)),
    Family("BART", "bart", ("BartForConditionalGeneration", "BartModel")),
    Family("BERT", "bert", ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")),
    _causal("BLOOM", "bloom", "Bloom", _ACTIVATION),
    Family("CLIP", "clip", ("CLIPModel", "CLIPTextModel", "CLIPVisionModel"), ("activation, gelu_quick",)),
    _causal("Cohere", "cohere", "Cohere", "layer norm without bias", "rotation of neighbours", _SILU),
    _causal("DeepSeek-V2", "deepseek_v2", "DeepseekV2", _RMS, _SILU, *_EXPERTS),
    _causal("DeepSeek-V3", "deepseek_v3", "DeepseekV3", _RMS, _HALVES, _SILU, *_EXPERTS),
    Family(
        "DistilBERT", "distilbert", ("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification")
    ),
    Family("ELECTRA", "electra", ("ElectraModel", "ElectraForMaskedLM", "ElectraForSequenceClassification")),
    _causal("Falcon", "falcon", "Falcon", _HALVES),
    _causal("Gemma", "gemma", "Gemma", "RMS norm of weights about 1", _HALVES, _GELU),
    _causal("Gemma 2", "gemma2", "Gemma2", "RMS norm of weights about 1", _HALVES, _GELU),
    _causal("Gemma 3 (text)", "gemma3_text", "Gemma3", "RMS norm of weights about 1", _HALVES, _GELU),
    _causal("GLM-4", "glm4", "Glm4", _RMS, _SILU),
    Family("GPT-2", "gpt2", ("GPT2LMHeadModel",), (_ACTIVATION,)),
    _causal("GPT-J", "gptj", "GPTJ", _ACTIVATION),
    _causal("GPT-Neo", "gpt_neo", "GPTNeo", _ACTIVATION),
    _causal("GPT-NeoX", "gpt_neox", "GPTNeoX", _HALVES),
    _causal("gpt-oss", "gpt_oss", "GptOss", _RMS, _GROUPED),
    _causal("Granite", "granite", "Granite", _RMS, _HALVES, _SILU),
    _causal("LLaMA", "llama", "Llama", _RMS, _HALVES, _SILU),
    _causal("Mistral", "mistral", "Mistral", _RMS, _HALVES, _SILU),
    _causal("Mixtral", "mixtral", "Mixtral", _RMS, _HALVES, *_EXPERTS),
    _causal("MPT", "mpt", "Mpt"),
    Family("mT5", "mt5", ("MT5ForConditionalGeneration", "MT5EncoderModel"), (_RMS, _ACTIVATION)),
    _causal("OLMo-2", "olmo2", "Olmo2", _RMS, _HALVES, _SILU),
    _causal("OPT", "opt", "OPT"),
    _causal("Phi", "phi", "Phi", _HALVES, _ACTIVATION),
    _causal("Phi-3", "phi3", "Phi3", _RMS, _HALVES, _SILU),
    _causal("Qwen2", "qwen2", "Qwen2", _RMS, _HALVES, _SILU),
    _causal("Qwen3", "qwen3", "Qwen3", _RMS, _HALVES, _SILU),
    _causal("Qwen3-MoE", "qwen3_moe", "Qwen3Moe", _RMS, _HALVES, *_EXPERTS),
    Family("RoBERTa", "roberta", ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification")),
    _causal("StableLM", "stablelm", "StableLm", _HALVES, _SILU),
    _causal("StarCoder2", "starcoder2", "Starcoder2", _HALVES),
    Family("T5, FLAN-T5", "t5", ("T5ForConditionalGeneration", "T5EncoderModel"), (_RMS,)),
    Family("Whisper", "whisper", ("WhisperForConditionalGeneration",)),
)
