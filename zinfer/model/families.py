"""The model families that are tested, the features each supports, and which models run in ragged batches.

[Note: families by measurement]
Whether sequences that share a ragged pass get what each gets alone depends on a family's code: it may count positions
by columns, attend by itself, mix tokens by convolutions, or choose among keys. No list says so. The model types below
were verified by tests of their tokens; of any other class `zinfer.batching.family_check` compares logits, on a few
layers with random weights of the same config, when a model is loaded first. What it finds is kept by class, options and
version of transformers in the user's cache folder.
"""

import copy
import json
import logging
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

import transformers
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.model.miniature import narrowed_sizes, rotary_border, shrink
from zinfer.model.sharding.plans import divides_experts, is_divided
from zinfer.nvme.whole_file import cache_folder, replace_file

log = logging.getLogger(__name__)

VERSION: Final = 1
"""Of how families are measured; another one measures again."""

INTERFACED: Final = frozenset(
    (
        *("cohere", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama"),
        *("mistral", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2"),
    )
)
"""Model types whose ragged greedy tokens were verified to equal transformers' `generate` of each prompt alone."""

ADAPTED: Final = frozenset(("bloom", "deepseek_v2", "deepseek_v3", "falcon", "gptj", "mpt"))
"""Model types with an attention forward in `zinfer.batching.adapters`."""

_UNPLAIN: Final = ("use_bidirectional_attention", "slow_but_exact")
"""Options with which no model type is trusted."""
_NAMES: Final = frozenset({"_name_or_path", "architectures", "dtype", "id2label", "label2id", "transformers_version"})
"""Members of a config that change nothing of how it runs."""
LIMITED_BY_ROTARY: Final = "rotary positions of type longrope or dynamic change beyond"
_found: dict[str, "Batching"] = {}


@dataclass(frozen=True)
class Batching:
    """Whether sequences of a model that share ragged passes get what each gets alone in transformers.

    Attributes:
        why_not: a reason; None: they do.
        max_tokens: of a sequence, up to which that holds; None: without a limit of its own.
        limited_by: the member of config.json that limits them.
    """

    why_not: str | None = None
    max_tokens: int | None = None
    limited_by: str | None = None


TOGETHER: Final = "together"
WALK_NAME: Final = "family_walk.json"


@cache
def walked_types() -> dict[str, tuple[str, str]]:
    """Return for each causal model type of transformers its class, and how its usual options run.

    That is `TOGETHER`, maybe with a limit; "padded: " and why; or "refused: " and why. `tests/walked_models.py` writes
    them.
    """
    return {model_type: (name, how) for model_type, (name, how) in _read_walk()["types"].items()}


def walked_version() -> str:
    """Return the version of transformers whose models `walked_types` has."""
    return str(_read_walk()["transformers"])


@cache
def _read_walk() -> Any:
    return json.loads(files("zinfer.model").joinpath(WALK_NAME).read_text())


def is_trusted(model: PreTrainedModel) -> bool:
    """Whether no measurement is needed: the model's type was verified, and neither its class nor an option is odd."""
    config: Any = model.config
    if config.get_text_config(decoder=True) is not config or config.model_type not in INTERFACED | ADAPTED:
        return False
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    oddities = [name for name in _UNPLAIN if getattr(config, name, False)]
    return not others and not oddities and bool(getattr(config, "is_causal", True))


def recall_batching(model: PreTrainedModel) -> Batching | None:
    """Return what is known of a model's class with its options; None: it was not measured on this machine."""
    config: Any = model.config.get_text_config(decoder=True)
    if is_trusted(model):
        return limited(config, Batching())
    key = _key(model)
    if key not in _found:
        path = cache_folder() / f"family-{key}.json"
        try:
            _found[key] = Batching(**json.loads(path.read_bytes())["batching"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is ignored, and the family measured again: %s", path, error)
            return None
    return _found[key]


def check_stages(model: PreTrainedModel) -> None:
    """Refuse stages of a pipeline for a model that does not run in ragged batches, as far as it was measured.

    Raises:
        ConfigError: says why.
    """
    found, model_type = recall_batching(model), model.config.get_text_config(decoder=True).model_type
    name, how = walked_types().get(model_type, ("", ""))
    if found is not None:
        why = found.why_not
    elif name != type(model).__name__:
        why = "its class was not measured; zinfer.LLM does that"
    else:
        why = None if how.startswith(TOGETHER) else how
    if why is not None:
        raise ConfigError(
            "zinfer.parallel.pipeline: stages need a model that runs in ragged batches, which a "
            f"{type(model).__name__} does not: {why}"
        )


def record_batching(model: PreTrainedModel, batching: Batching) -> None:
    """Keep what was measured, for this process and in `cache_folder` for later ones; a failure to write is logged."""
    key = _key(model)
    _found[key] = batching
    path = cache_folder() / f"family-{key}.json"
    stated = {"class": type(model).__name__, "transformers": transformers.__version__, "batching": asdict(batching)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(stated, indent=1) + "\n")
    except OSError as error:
        log.info("%s: %s; families are measured again at each start", path, error.strerror)


def forget_batching() -> None:
    """Forget what this process has measured or read; what is in the cache folder stays."""
    _found.clear()


def choosing_tokens(config: Any) -> int | None:
    """Return the tokens up to which all keys are chosen, by an index or a chunk of a text config; None: without end."""
    sizes = narrowed_sizes(config)
    names = ["index_topk", "index_block_size"]
    names += ["attention_chunk_size"] if "chunked_attention" in (getattr(config, "layer_types", None) or ()) else []
    return min((sizes[name] for name in names if name in sizes), default=None)


def limited(config: Any, batching: Batching) -> Batching:
    """Return it with the limit of rotary positions that change in long sequences, if that is tighter."""
    border, _ = rotary_border(config)
    if border is None or (batching.max_tokens is not None and batching.max_tokens <= border):
        return batching
    return replace(batching, max_tokens=border, limited_by=LIMITED_BY_ROTARY)


def _key(model: PreTrainedModel) -> str:
    """Identify a class and its options, also the kinds of its layers, without sizes and token ids."""
    config: Any = copy.deepcopy(model.config.get_text_config(decoder=True))
    shrink(config)
    options = {name: value for name, value in config.to_dict().items() if name not in _NAMES}
    options = {name: value for name, value in options.items() if not name.endswith("_token_id")}
    num_layers = options.pop("num_hidden_layers", None)
    by_layer = [name for name, value in options.items() if isinstance(value, list) and len(value) == num_layers]
    kinds = sorted({str(kind) for kind in zip(*(options.pop(name) for name in by_layer), strict=True)})
    stated = [VERSION, transformers.__version__, type(model).__name__, by_layer, kinds, options]
    return sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()[:16]


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
        name, how = walked_types().get(self.model_type, ("", ""))
        return name in self.classes and how.startswith(TOGETHER)

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
