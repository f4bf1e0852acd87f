"""Where GGUF files hold each of a model's parameters, by transformers' names.

llama.cpp writes a model under names of its own, and changes some weights on the way (its conversion/*.py); a `Recipe`
says how they are made back. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NoReturn, TypeAlias

from zinfer.weights.folder import fail, listed, shorten
from zinfer.weights.gguf_config import Keys, model_config
from zinfer.weights.gguf_header import GgufHeader, GgufTensor

_PLAIN: Final = ("F32", "F16", "BF16")
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
        model = cls(model_config(keys))
        layout = _MIXTRAL if keys.arch == "llama" and keys.has_experts else _ARCHITECTURES[keys.arch]
        for name, tensor in keys.tensors.items():
            if not _UNREAD.fullmatch(name):
                model._place(keys, layout, name, tensor)
        return model

    def _place(self, keys: Keys, layout: "_Architecture", name: str, tensor: GgufTensor) -> None:
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)", name)
        if match is None:
            if (target := _OUTSIDE.get(name)) is None:
                _refuse(keys, name)
            self._add(target, tensor, layout.recipe_of(name))
            return
        number, leaf, kind = int(match[1]), match[2], match[3]
        if number >= self.config["num_hidden_layers"]:
            return  # predicts further tokens, and is not read
        prefix = f"model.layers.{number}."
        if leaf in layout.special:
            self._add_special(keys, layout.special[leaf], prefix, leaf, kind)
        elif (target := layout.names.get(leaf, _LAYER.get(leaf))) is None:
            _refuse(keys, name)
        elif "{}" in target:
            count = keys.size("expert_count")
            if len(tensor.shape) != 3 or tensor.shape[0] != count:
                keys.fail(f"the tensor {name} has shape {list(tensor.shape)}, not a matrix of each of {count} experts")
            for expert, own in enumerate(_experts_of(tensor)):
                self._add(f"{prefix}{target.format(expert)}.{kind}", own, Recipe.ROWS)
        else:
            suffix = "" if target.endswith(_WHOLE_NAMES) else f".{kind}"
            self._add(f"{prefix}{target}{suffix}", tensor, layout.recipe_of(leaf), self.config["head_dim"])

    def _add(self, name: str, tensor: GgufTensor, recipe: Recipe, unit: int = 1) -> None:
        if name.endswith("shared_expert_gate.weight"):
            tensor = replace(tensor, shape=(1, tensor.shape[-1]))
        if recipe is Recipe.ROWS and tensor.type.name in _PLAIN:
            self.plain[name] = tensor
        else:
            self.encoded[name] = Encoded(tensor.shape, recipe, (tensor,), unit)

    def _add_special(self, keys: Keys, made: "_Made", prefix: str, leaf: str, kind: str) -> None:
        """Add a parameter that is made of the tensors of several leaves, when the first of them is met."""
        leaves, name, recipe = made
        if leaf != leaves[0]:
            return
        layer = prefix.replace("model.layers.", "blk.")
        parts = tuple(keys.tensor(f"{layer}{each}.{kind}") for each in leaves)
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


def _refuse(keys: Keys, name: str) -> NoReturn:
    keys.fail(f"the tensor {shorten(name)} has no place in a model of architecture {keys.arch} that is read")


def _experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Yield the matrix of each expert, of which a tensor holds all."""
    count, shape = tensor.shape[0], tensor.shape[1:]
    nbytes = tensor.nbytes // count
    for number in range(count):
        offset = tensor.offset + number * nbytes
        yield replace(tensor, name=f"{tensor.name}[{number}]", shape=shape, offset=offset, nbytes=nbytes)


def _joined_tensors(headers: Sequence[GgufHeader]) -> dict[str, GgufTensor]:
    tensors = dict[str, GgufTensor]()
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                fail(header.file, f"the tensor {shorten(name)} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    return tensors


_Made: TypeAlias = tuple[tuple[str, ...], str, Recipe]


@dataclass(frozen=True)
class _Architecture:
    """Where an architecture of llama.cpp has the weights of transformers' model.

    Attributes:
        names: of a layer's modules, by llama.cpp's; ``{}`` stands for an expert's number.
        recipes: of a layer's modules, by llama.cpp's names; their first part if they end with *.
        special: modules that a recipe makes of several: all of them, the parameter's name, and the recipe.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    special: Mapping[str, _Made] = field(default_factory=dict)

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


_MIXTRAL: Final = _Architecture(_W123, _HALVES)
_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture(recipes=_HALVES),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "qwen2moe": _Architecture(
        _EXPERTS
        | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
    "qwen3moe": _Architecture(_EXPERTS),
    "gemma2": _Architecture(_GEMMA, {"norm": Recipe.LESS_ONE}),
    "gemma3": _Architecture(_GEMMA, {"norm": Recipe.LESS_ONE}),
    "phi3": _Architecture({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": _Architecture(
        {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"} | _AFTER_ATTENTION,
        special=dict.fromkeys(
            ("ffn_gate_exps", "ffn_up_exps"),
            (("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.gate_up_proj", Recipe.GATE_UP),
        )
        | {"ffn_down_exps": (("ffn_down_exps",), "mlp.experts.down_proj", Recipe.TRANSPOSED)},
    ),
    "deepseek2": _Architecture(
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
    "glm4moe": _Architecture(_EXPERTS | _SHARED | _AFTER_ATTENTION),
    "minimax-m2": _Architecture(_W123 | {"exp_probs_b": "mlp.e_score_correction_bias"}),
}
"""By general.architecture; those of `zinfer.weights.gguf_config.FAMILIES`."""
