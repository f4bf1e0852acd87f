"""config.json out of a GGUF file's metadata, whose keys and types are checked here.

What the metadata does not hold follows llama.cpp's own code (src/models/*.cpp) and its conversion (conversion/*.py).
Imports no torch: a file of an architecture that is not read is refused at once.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import numpy as np

from zinfer.weights.folder import fail, shorten, unreadable
from zinfer.weights.gguf_header import GgufHeader, GgufTensor

_NEWER: Final = "take a file that a newer llama.cpp converted, or the model in safetensors"
OWN_FOLDER: Final = (
    "put the file into a folder with the model's own config.json and tokenizer files, and give that folder"
)


class Keys:
    """The metadata of a model, with checked types, and its tensors."""

    def __init__(self, header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> None:
        self.file, self.tensors, self._metadata = header.file, tensors, header.metadata
        self.arch = self.text("general.architecture")
        if self.arch not in FAMILIES:
            what = f"general.architecture is {shorten(self.arch)}: {', '.join(FAMILIES)} are read"
            self.fail(what, "take the model in safetensors")
        self.has_experts = bool(self.whole("expert_count", 0))

    def fail(self, what: str, remedy: str = _NEWER) -> NoReturn:
        fail(self.file, what, remedy)

    def tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            self.fail(f"the tensor {shorten(name)} is missing", "download the file again")
        return self.tensors[name]

    def _value(self, key: str, kinds: tuple[type, ...], words: str, default: Any) -> Any:
        """Return a value of one of these types; keys without a point before them are the architecture's."""
        full = key if key.startswith(("general.", "tokenizer.")) else f"{self.arch}.{key}"
        if (value := self._metadata.get(full)) is None:
            if default is REQUIRED:
                self.fail(f"the key {full} is missing")
            return default
        if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
            self.fail(f"{full} is {shorten(repr(value))[1:-1]}, not {words}", f"{_NEWER}")
        return value

    def whole(self, key: str, default: Any = None) -> Any:
        return self._value(key, (int,), "a whole number", default)

    def number(self, key: str, default: Any = None) -> Any:
        return self._value(key, (int, float), "a number", default)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._value(key, (bool,), "true or false", default))

    def text(self, key: str, default: Any = None) -> Any:
        return self._value(key, (str,), "a text", REQUIRED if default is None else default)

    def texts(self, key: str) -> list[str] | None:
        value = self._value(key, (list,), "a list", None)
        if value is not None and not all(isinstance(each, str) for each in value):
            self.fail(f"{key} is not a list of texts")
        return None if value is None else list(value)

    def numbers(self, key: str) -> list[float] | None:
        value = self._value(key, (list,), "a list", None)
        if value is not None and any(isinstance(each, str) for each in value):
            self.fail(f"{key} is not a list of numbers")
        return None if value is None else list(value)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0; required unless there is a default."""
        number = self.whole(key, REQUIRED if default is None else default)
        if not 0 < number < 1 << 40:
            self.fail(f"{self.arch}.{key} is {number}")
        return int(number)

    def values(self, name: str) -> list[float]:
        """Read a tensor of float32 values."""
        tensor = self.tensor(name)
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            self.fail(f"the tensor {name} is no list of F32")
        try:
            found = np.fromfile(tensor.file, "<f4", tensor.shape[0], offset=tensor.offset)
        except OSError as error:
            raise unreadable(tensor.file, error) from error
        if len(found) < tensor.shape[0] or not np.isfinite(found).all():
            self.fail(f"the tensor {name} holds no finite values", "download the file again")
        return [float(value) for value in found]


REQUIRED: Final = object()


def model_config(keys: Keys) -> dict[str, Any]:
    """Return what config.json holds."""
    tensors = keys.tensors
    model_type, model_class, own = _MIXTRAL if keys.arch == "llama" and keys.has_experts else FAMILIES[keys.arch]
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    embedding = keys.tensor("token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        keys.fail(f"token_embd.weight has shape {list(embedding.shape)}, and {keys.arch}.embedding_length is {hidden}")
    head_dim = keys.size("attention.key_length", keys.size("rope.dimension_count", hidden // heads))
    config = {
        "model_type": model_type,
        "architectures": [model_class],
        "dtype": _dtype(tensors),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.size("block_count") - keys.whole("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", REQUIRED),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(keys, head_dim),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = keys.whole(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = token if token is not None and 0 <= token < embedding.shape[0] else None
    if (width := keys.whole("feed_forward_length")) is not None:
        config["intermediate_size"] = width
    return config | own(keys)


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """Return the dtype to compute in: that of the matrices if they are not quantized, else bfloat16."""
    names = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if names == {"F32"}:
        return "float32"
    return "float16" if names <= {"F16", "F32"} else "bfloat16"


def _rope(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return transformers' rope_parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base", 10_000.0))}
    dims = keys.size("rope.dimension_count", head_dim)
    if dims != head_dim:
        rope["partial_rotary_factor"] = dims / head_dim
    if "rope_freqs.weight" in keys.tensors:
        return rope | _llama3(keys, rope["rope_theta"], dims)
    kind, factor = keys.text("rope.scaling.type", "none"), keys.number("rope.scaling.factor")
    if kind == "none" and (factor := keys.number("rope.scale_linear", 1.0)) != 1:
        kind = "linear"
    if kind in ("none", "longrope") or (kind == "linear" and not factor):
        return rope  # longrope: of phi3, out of its tensors
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        keys.fail(f"{keys.arch}.rope.scaling.type is {shorten(kind)}: none, linear, yarn and longrope are read")
    rope |= {"rope_type": "yarn", "factor": float(keys.number("rope.scaling.factor", REQUIRED))}
    rope["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    for name, key in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        if (value := keys.number(f"rope.scaling.yarn_{key}")) is not None:
            rope[name] = float(value)
    return rope


def _llama3(keys: Keys, theta: float, dims: int) -> dict[str, Any]:
    """Return the scaling of Llama 3 that the divisors of its frequencies come from."""
    name = "rope_freqs.weight"
    found = np.array(keys.values(name), np.float64)
    if len(found) != dims // 2:
        keys.fail(f"{name} holds {len(found)} values for {dims // 2} frequencies")
    if np.all(found == 1):
        return {}
    factor, low, high = float(found.max()), 1.0, 4.0
    waves = 2 * math.pi * theta ** (np.arange(0, dims, 2) / dims)
    between = np.flatnonzero((found > 1) & (found < factor))
    share = (1 / found[between] - 1 / factor) / (1 - 1 / factor)
    original = round(float(np.median(waves[between] * (low + share * (high - low))))) if len(between) else 8192
    smooth = (original / waves - low) / (high - low)
    mixed = 1 / ((1 - smooth) / factor + smooth)
    wanted = np.where(waves < original / high, 1, np.where(waves > original / low, factor, mixed))
    if not np.allclose(wanted, found, rtol=1e-3):
        keys.fail(f"{name} holds other divisors than Llama 3's, which are not read", OWN_FOLDER)
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return scaling | {"original_max_position_embeddings": original}


def _dense(keys: Keys) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.tensors}


def _nothing(keys: Keys) -> dict[str, Any]:
    return {}


def _routed(keys: Keys, number: str) -> dict[str, Any]:
    return {
        number: keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
    }


def _mixtral(keys: Keys) -> dict[str, Any]:
    return {"num_local_experts": keys.size("expert_count"), "num_experts_per_tok": keys.size("expert_used_count")}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    shared = keys.tensor("blk.0.ffn_gate_shexp.weight").shape[0]
    return _routed(keys, "num_experts") | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _dense(keys) | _routed(keys, "num_experts") | {"norm_topk_prob": True, "mlp_only_layers": []}


def _query_scalar(keys: Keys, wide_layers: int) -> int:
    """Return what the scale of Gemma's queries comes from: the head's width, or in the 27B model the hidden one's."""
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    is_wide = keys.size("block_count") == wide_layers
    return hidden // heads if is_wide else keys.size("attention.key_length", hidden // heads)


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(keys, 46),
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": float(keys.number("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(keys.number("final_logit_softcapping", 30.0)),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    full = _rope(keys, keys.size("attention.key_length"))
    if keys.number("rope.freq_base") is None:
        full["rope_theta"] = 1_000_000.0
    local = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base_swa", 10_000.0))}
    pattern = keys.size("attention.sliding_window_pattern", 6)
    count = keys.size("block_count")
    return {
        "query_pre_attn_scalar": _query_scalar(keys, 62),
        "sliding_window": keys.size("attention.sliding_window", 1024),
        "layer_types": [("sliding", "full")[(n + 1) % pattern == 0] + "_attention" for n in range(count)],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    rope = _rope(keys, hidden // heads)
    original = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    if "rope_factors_long.weight" in keys.tensors:
        long, short = keys.values("rope_factors_long.weight"), keys.values("rope_factors_short.weight")
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    return {
        "head_dim": hidden // heads,
        "rope_parameters": {"partial_rotary_factor": 1.0} | rope,
        "original_max_position_embeddings": original,
        "sliding_window": keys.whole("attention.sliding_window", 0) or None,
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    rope = _rope(keys, keys.size("attention.key_length"))
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "sliding_window": keys.size("attention.sliding_window"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


_SIGMOID: Final = 2
"""ggml's number of the gate that DeepSeek-V3 has."""


def _deepseek(keys: Keys) -> dict[str, Any]:
    dims = keys.size("rope.dimension_count")
    key_dim = keys.size("attention.key_length_mla", keys.size("attention.key_length"))
    rope, groups = _rope(keys, dims), keys.size("expert_group_count", 1)
    if rope["rope_type"] == "yarn" and (multiplier := keys.number("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier / 0.1, 6))
    is_third = keys.whole("expert_gating_func", 1) == _SIGMOID
    config = _routed(keys, "n_routed_experts") | {
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "n_group": groups,
        "topk_group": keys.size("expert_group_used_count", 1),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": float(keys.number("expert_weights_scale", 1.0)) or 1.0,
        "q_lora_rank": keys.whole("attention.q_lora_rank"),
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": dims,
        "qk_nope_head_dim": key_dim - dims,
        "v_head_dim": keys.size("attention.value_length_mla", keys.size("attention.value_length")),
        "num_key_value_heads": keys.size("attention.head_count"),
        "head_dim": dims,
        "rope_parameters": rope,
    }
    if is_third:
        return config | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return config | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    return _routed(keys, "n_routed_experts") | {
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": float(keys.number("expert_weights_scale", 1.0)),
    }


def _minimax_m2(keys: Keys) -> dict[str, Any]:
    if (gate := keys.whole("expert_gating_func", _SIGMOID)) != _SIGMOID:
        keys.fail(f"{keys.arch}.expert_gating_func is {gate}, and {_SIGMOID} (sigmoid) is read")
    config = _routed(keys, "num_local_experts")
    return config | {"intermediate_size": config.pop("moe_intermediate_size")}


_MIXTRAL: Final = ("mixtral", "MixtralForCausalLM", _mixtral)
"""Of architecture llama, with experts."""
FAMILIES: Final[Mapping[str, tuple[str, str, Callable[[Keys], dict[str, Any]]]]] = {
    "llama": ("llama", "LlamaForCausalLM", _dense),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", _nothing),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", _dense),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "phi3": ("phi3", "Phi3ForCausalLM", _phi3),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2),
}
"""By general.architecture: transformers' model type and class, and what config.json has beside what all have."""
