"""The model that GGUF files hold: its config.json, and the place of each of transformers' parameters in them.

llama.cpp writes a model under names of its own, and changes some weights on the way (its conversion/*.py); a `Recipe`
says how they are made back. What the metadata does not hold follows llama.cpp's own code (src/models/*.cpp). Imports no
torch: a file of an architecture that is not read is refused at once.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NoReturn

import numpy as np

from zinfer.weights.folder import fail, listed, shorten, unreadable
from zinfer.weights.gguf_header import GgufHeader, GgufTensor

_NEWER: Final = "take a file that a newer llama.cpp converted, or the model in safetensors"
OWN_FOLDER: Final = (
    "put the file into a folder with the model's own config.json and tokenizer files, and give that folder"
)
_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_UNREAD: Final = re.compile(r"(rope_freqs|rope_factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that the config is made of, or that are computed."""


class Recipe(Enum):
    """How a parameter is made of tensors of the file."""

    ROWS = "the tensor's values"
    HALVES = "rows of heads whose two rotated halves are interleaved"
    LESS_ONE = "values with 1 added"
    KEYS_VALUES = "keys, each head transposed, and values: of each head its keys' rows, then its values' rows"
    GATE_UP = "gate and up of each expert, transposed, in alternate columns"
    TRANSPOSED = "each expert transposed"
    ALTERNATE = "gate and up of each expert, in alternate columns"


@dataclass(frozen=True)
class Encoded:
    """A parameter that is not stored as it is.

    Attributes:
        shape: of the parameter.
        parts: tensors of the file, as the recipe names them.
        unit: rows of a head (HALVES), or the number of heads or experts.
    """

    shape: tuple[int, ...]
    recipe: Recipe
    parts: tuple[GgufTensor, ...]
    unit: int = 1


@dataclass(frozen=True)
class GgufModel:
    """What the headers of a model's files say.

    Attributes:
        config: of config.json.
        plain: tensors stored as they are, by transformers' names.
        encoded: parameters stored otherwise, by transformers' names.
    """

    config: dict[str, Any]
    plain: dict[str, GgufTensor] = field(default_factory=dict)
    encoded: dict[str, Encoded] = field(default_factory=dict)

    @classmethod
    def of(cls, headers: Sequence[GgufHeader]) -> "GgufModel":
        """Describe the model in these files, of which the first one has the metadata.

        Raises:
            CheckpointError: an architecture, key or tensor that is not read, or that is missing.
        """
        keys = Keys(headers[0], _joined_tensors(headers))
        config = _config(keys)
        model = cls(config)
        for name, tensor in keys.tensors.items():
            if not _UNREAD.fullmatch(name):
                model._place(keys, name, tensor)
        return model

    def _place(self, keys: "Keys", name: str, tensor: GgufTensor) -> None:
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)", name)
        if match is None:
            if (target := _OUTSIDE.get(name)) is None:
                keys.refuse_tensor(name)
            self._add(target, tensor, keys.kind.recipe_of(name))
            return
        number, leaf, kind = int(match[1]), match[2], match[3]
        if number >= self.config["num_hidden_layers"]:
            return  # predicts further tokens, and is not read
        prefix = f"model.layers.{number}."
        if leaf in keys.kind.special:
            self._add_special(keys, prefix, leaf, kind, f"blk.{number}")
        elif (target := keys.kind.names.get(leaf, _LAYER.get(leaf))) is None:
            keys.refuse_tensor(name)
        elif "{}" in target:
            count = keys.size("expert_count")
            if len(tensor.shape) != 3 or tensor.shape[0] != count:
                keys.fail(f"the tensor {name} has shape {list(tensor.shape)}, not a matrix of each of {count} experts")
            for expert, own in enumerate(_experts_of(tensor)):
                self._add(f"{prefix}{target.format(expert)}.{kind}", own, Recipe.ROWS)
        else:
            suffix = "" if target.endswith(_WHOLE_NAMES) else f".{kind}"
            self._add(f"{prefix}{target}{suffix}", tensor, keys.kind.recipe_of(leaf), self.config["head_dim"])

    def _add(self, name: str, tensor: GgufTensor, recipe: Recipe, unit: int = 1) -> None:
        if name.endswith("shared_expert_gate.weight"):
            tensor = replace(tensor, shape=(1, tensor.shape[-1]))
        if recipe is Recipe.ROWS and tensor.type.name in _PLAIN:
            self.plain[name] = tensor
        else:
            self.encoded[name] = Encoded(tensor.shape, recipe, (tensor,), unit)

    def _add_special(self, keys: "Keys", prefix: str, leaf: str, kind: str, layer: str) -> None:
        """Add a parameter that is made of the tensors of several leaves, when the first of them is met."""
        leaves, name, recipe = keys.kind.special[leaf]
        if leaf != leaves[0]:
            return
        parts = tuple(keys.tensor(f"{layer}.{each}.{kind}") for each in leaves)
        if kind == "bias":
            name, recipe = f"{name}_bias", Recipe.ALTERNATE if len(parts) > 1 else Recipe.ROWS
        first, last = parts[0].shape, parts[-1].shape
        if any(len(part.shape) != (2 if kind == "bias" else 3) or part.shape[0] != first[0] for part in parts):
            keys.fail(f"tensors {listed([part.name for part in parts])} have other shapes than their model's")
        if recipe is Recipe.KEYS_VALUES:
            shape: tuple[int, ...] = (first[0] * (first[2] + last[1]), first[1])
        elif recipe is Recipe.GATE_UP:
            shape = (first[0], first[2], 2 * first[1])
        elif recipe is Recipe.ALTERNATE:
            shape = (first[0], 2 * first[1])
        else:
            shape = first if recipe is Recipe.ROWS else (first[0], first[2], first[1])
        if recipe is Recipe.ROWS:
            self._add(prefix + name, parts[0], recipe)
        else:
            self.encoded[prefix + name] = Encoded(shape, recipe, parts, first[0])


def _experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Yield the matrix of each expert, of which a tensor holds all."""
    count, shape = tensor.shape[0], tensor.shape[1:]
    nbytes = tensor.nbytes // count
    for number in range(count):
        offset = tensor.offset + number * nbytes
        yield replace(tensor, name=f"{tensor.name}[{number}]", shape=shape, offset=offset, nbytes=nbytes)


class Keys:
    """The metadata of a model, with checked types, and its tensors."""

    def __init__(self, header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> None:
        self.file, self.tensors, self._metadata = header.file, tensors, header.metadata
        self.arch = self.text("general.architecture")
        kind = _ARCHITECTURES.get(self.arch)
        if kind is None:
            what = f"general.architecture is {shorten(self.arch)}: {', '.join(_ARCHITECTURES)} are read"
            self.fail(what, "take the model in safetensors")
        self.kind: _Architecture = kind if self.arch != "llama" or not self.whole("expert_count", 0) else _MIXTRAL

    def fail(self, what: str, remedy: str = _NEWER) -> NoReturn:
        fail(self.file, what, remedy)

    def refuse_tensor(self, name: str) -> NoReturn:
        """Refuse a tensor without a place in the model."""
        self.fail(f"the tensor {shorten(name)} has no place in a model of architecture {self.arch} that is read")

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


def _joined_tensors(headers: Sequence[GgufHeader]) -> dict[str, GgufTensor]:
    tensors = dict[str, GgufTensor]()
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                fail(header.file, f"the tensor {shorten(name)} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    return tensors


@dataclass(frozen=True)
class _Architecture:
    """An architecture of llama.cpp.

    Attributes:
        model_type, model_class: transformers'.
        config: what its config.json has beside what all have.
        names: of a layer's modules, by llama.cpp's; ``{}`` stands for an expert's number.
        recipes: of a layer's modules, by llama.cpp's names; their first part if they end with *.
        special: modules that a recipe makes of several: all of them, the parameter's name, and the recipe.
    """

    model_type: str
    model_class: str
    config: Callable[[Keys], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    special: Mapping[str, tuple[tuple[str, ...], str, Recipe]] = field(default_factory=dict)

    def recipe_of(self, name: str) -> Recipe:
        """Return the recipe of a tensor, by its name in a layer or outside."""
        if "norm" in name and "norm" in self.recipes:
            return self.recipes["norm"]
        return self.recipes.get(name, Recipe.ROWS)


_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE_NAMES: Final = ("e_score_correction_bias", "sinks")
_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_W123: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.w1",
    "ffn_up_exps": "mlp.experts.{}.w3",
    "ffn_down_exps": "mlp.experts.{}.w2",
}
_SHARED: Final = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HALVES: Final = {"attn_q": Recipe.HALVES, "attn_k": Recipe.HALVES}
_AFTER_ATTENTION: Final = {"post_attention_norm": "post_attention_layernorm"}


def _config(keys: Keys) -> dict[str, Any]:
    """Return what config.json holds."""
    tensors, kind = keys.tensors, keys.kind
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    embedding = keys.tensor("token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        keys.fail(f"token_embd.weight has shape {list(embedding.shape)}, and {keys.arch}.embedding_length is {hidden}")
    head_dim = keys.size("attention.key_length", keys.size("rope.dimension_count", hidden // heads))
    config = {
        "model_type": kind.model_type,
        "architectures": [kind.model_class],
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
    return config | kind.config(keys)


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


_MIXTRAL: Final = _Architecture("mixtral", "MixtralForCausalLM", _mixtral, _W123, _HALVES)
_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _dense, recipes=_HALVES),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _nothing),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _dense),
    "qwen2moe": _Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _qwen2_moe,
        _EXPERTS
        | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _EXPERTS),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, _GEMMA, {"norm": Recipe.LESS_ONE}),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, _GEMMA, {"norm": Recipe.LESS_ONE}),
    "phi3": _Architecture(
        "phi3", "Phi3ForCausalLM", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "gpt-oss": _Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"} | _AFTER_ATTENTION,
        special=dict.fromkeys(
            ("ffn_gate_exps", "ffn_up_exps"),
            (("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.gate_up_proj", Recipe.GATE_UP),
        )
        | {"ffn_down_exps": (("ffn_down_exps",), "mlp.experts.down_proj", Recipe.TRANSPOSED)},
    ),
    "deepseek2": _Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _deepseek,
        _EXPERTS
        | _SHARED
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        special=dict.fromkeys(
            ("attn_k_b", "attn_v_b"), (("attn_k_b", "attn_v_b"), "self_attn.kv_b_proj.weight", Recipe.KEYS_VALUES)
        ),
    ),
    "glm4moe": _Architecture("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, _EXPERTS | _SHARED | _AFTER_ATTENTION),
    "minimax-m2": _Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2, _W123 | {"exp_probs_b": "mlp.e_score_correction_bias"}
    ),
}
"""What is read, by general.architecture."""
