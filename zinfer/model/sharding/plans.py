"""How each family's layers are divided: transformers' own plans as data, and others in its words.

transformers states in `base_model_tp_plan` of a config how the modules of a layer are divided. Families without a plan,
and plans that would gather fused products, have their own here, by DeepSpeed's rule: the linear layers before a sum
over ranks are divided by columns ("rowwise"), all others by rows ("colwise").

Experts can be divided by their number instead, as `base_model_ep_plan` states; all else is then divided as above if its
heads can be, and held whole by every rank if not. Where groups of ranks divide experts by number, those of a group
divide each expert's matrices as above.
"""

import re
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from zinfer.errors import ConfigError
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.heads import can_divide
from zinfer.model.spec import count_experts

COLWISE: Final = "colwise"
ROWWISE: Final = "rowwise"
PACKED: Final = "packed_colwise"
EXPERTS: Final = "moe_tp_experts"
GATHERED: Final = "colwise_gather_output"
SPLIT: Final = "rowwise_split_input"
DISPATCHED: Final = "ep_dispatch_experts"
"""A module of experts that computes those of a rank."""
BY_NUMBER: Final = "grouped_gemm"
"""A parameter with a slice for each expert, of which a rank has those of its experts."""
# Not words of transformers:
FUSED: Final = "fused_colwise"
"""Queries of all heads, then keys of all, then values of all."""
GROUPED: Final = "grouped_colwise"
"""For each head of keys its queries, its key and its value."""
PAIRED: Final = "paired_colwise"
"""Rows of the gate and of the other product in turn."""
PER_HEAD: Final = "per_head"
"""A value for each head, in the last dimension."""
REPLICATED: Final = "replicated"
EVERYTHING_ELSE: Final = "*"
"""The key of a plan for what it does not name; without it, weights that are not named are an error."""

_KNOWN: Final = frozenset(
    (COLWISE, ROWWISE, PACKED, EXPERTS, GATHERED, SPLIT, FUSED, GROUPED, PAIRED, PER_HEAD, REPLICATED)
)
_KNOWN_OF_EXPERTS: Final = frozenset((DISPATCHED, BY_NUMBER, REPLICATED))
_SAME: Final = MappingProxyType({"replicated_with_grad_allreduce": REPLICATED, "mla_kv_a_proj": REPLICATED})
"""Other words for the same."""
_SAME_OF_EXPERTS: Final = MappingProxyType({"ep_router": REPLICATED, EXPERTS: DISPATCHED})
"""Words of transformers 5.17."""

Plan = Mapping[str, str]
"""Styles by the ends of paths within a layer."""


def _linears(attention: str, others: Iterable[str], out: str, fc: Iterable[str], last: str) -> Plan:
    rows = {f"{attention}.{name}": COLWISE for name in others} | dict.fromkeys(fc, COLWISE)
    return MappingProxyType({**rows, f"{attention}.{out}": ROWWISE, last: ROWWISE})


_QKV: Final = ("q_proj", "k_proj", "v_proj")
_GATED: Final = ("mlp.gate_proj", "mlp.up_proj")
_LLAMA: Final = _linears("self_attn", _QKV, "o_proj", _GATED, "mlp.down_proj")
_BERT: Final = MappingProxyType(
    {
        **dict.fromkeys(("attention.self.query", "attention.self.key", "attention.self.value"), COLWISE),
        "attention.output.dense": ROWWISE,
        "intermediate.dense": COLWISE,
        "output.dense": ROWWISE,
    }
)
_T5: Final = MappingProxyType(
    {
        **{f"{each}.{name}": COLWISE for each in ("SelfAttention", "EncDecAttention") for name in "qkv"},
        **{f"{each}.o": ROWWISE for each in ("SelfAttention", "EncDecAttention")},
        "relative_attention_bias": PER_HEAD,
        **{f"DenseReluDense.{name}": COLWISE for name in ("wi", "wi_0", "wi_1")},
        "DenseReluDense.wo": ROWWISE,
    }
)
_LATENT: Final = MappingProxyType(
    {
        "self_attn.q_proj": COLWISE,
        "self_attn.q_b_proj": COLWISE,
        "self_attn.kv_b_proj": COLWISE,
        "self_attn.o_proj": ROWWISE,
    }
)
_PAIR: Final = MappingProxyType(
    {
        **{f"{each}.{name}": COLWISE for each in ("self_attn", "encoder_attn") for name in _QKV},
        **{f"{each}.out_proj": ROWWISE for each in ("self_attn", "encoder_attn")},
        "fc1": COLWISE,
        "fc2": ROWWISE,
    }
)
_CLIP: Final = _linears("self_attn", _QKV, "out_proj", ("mlp.fc1",), "mlp.fc2")
_OWN: Final[Mapping[str, Plan]] = {
    "albert": MappingProxyType(
        {
            **{f"attention.{name}": COLWISE for name in ("query", "key", "value")},
            "attention.dense": ROWWISE,
            "ffn": COLWISE,
            "ffn_output": ROWWISE,
        }
    ),
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus", "plbart"), _PAIR
    ),
    "bert": _BERT,
    "bloom": MappingProxyType(
        {
            "self_attention.query_key_value": COLWISE,
            "self_attention.dense": ROWWISE,
            "mlp.dense_h_to_4h": COLWISE,
            "mlp.dense_4h_to_h": ROWWISE,
        }
    ),
    **dict.fromkeys(("clip", "clip_text_model", "clip_vision_model"), _CLIP),
    "deepseek_v3": _LATENT,
    "distilbert": MappingProxyType(
        {
            **{f"attention.{name}_lin": COLWISE for name in "qkv"},
            "attention.out_lin": ROWWISE,
            "ffn.lin1": COLWISE,
            "ffn.lin2": ROWWISE,
        }
    ),
    "electra": _BERT,
    "falcon": MappingProxyType(
        {"self_attention.dense": ROWWISE, "mlp.dense_h_to_4h": COLWISE, "mlp.dense_4h_to_h": ROWWISE}
    ),
    "glm4": MappingProxyType({"mlp.gate_up_proj": PACKED, "mlp.down_proj": ROWWISE}),
    "gpt2": MappingProxyType(
        {"attn.c_attn": FUSED, "attn.c_proj": ROWWISE, "mlp.c_fc": COLWISE, "mlp.c_proj": ROWWISE}
    ),
    "gpt_neo": _linears("attn.attention", _QKV, "out_proj", ("mlp.c_fc",), "mlp.c_proj"),
    "gpt_oss": MappingProxyType(
        {
            **{f"self_attn.{name}": COLWISE for name in _QKV},
            "self_attn.o_proj": ROWWISE,
            "self_attn.sinks": PER_HEAD,
            "mlp.experts": EXPERTS,
            "mlp.experts.gate_up_proj": PAIRED,
            "mlp.experts.gate_up_proj_bias": PAIRED,
            "mlp.experts.down_proj": ROWWISE,
            "mlp.experts.down_proj_bias": ROWWISE,
        }
    ),
    "gptj": _linears("attn", _QKV, "out_proj", ("mlp.fc_in",), "mlp.fc_out"),
    "mpt": MappingProxyType(
        {"attn.Wqkv": FUSED, "attn.out_proj": ROWWISE, "ffn.up_proj": COLWISE, "ffn.down_proj": ROWWISE}
    ),
    "mt5": _T5,
    "opt": _linears("self_attn", _QKV, "out_proj", ("fc1",), "fc2"),
    "phi3": MappingProxyType(
        {
            "self_attn.qkv_proj": FUSED,
            "self_attn.o_proj": ROWWISE,
            "mlp.gate_up_proj": PACKED,
            "mlp.down_proj": ROWWISE,
        }
    ),
    "qwen2_moe": MappingProxyType(
        {
            **{f"mlp.shared_expert.{name}": COLWISE for name in ("gate_proj", "up_proj")},
            "mlp.shared_expert.down_proj": ROWWISE,
            "mlp.shared_expert_gate": REPLICATED,
        }
    ),
    "roberta": _BERT,
    "stablelm": _LLAMA,
    "t5": _T5,
    "whisper": _PAIR,
}
_PLANNED: Final = frozenset(
    {"cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "llama"}
    | {"mistral", "mixtral", "olmo2", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
    | {"starcoder2"}
)
"""Families whose plan in transformers is followed, except for what is stated here."""
_MIXTURES: Final = frozenset(("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"))
"""Families whose experts are divided by number, as their plan in transformers says."""
_LAYER_NUMBER: Final = re.compile(r"^.*\.\*\.")
# Switches of a config under which a layer has weights that the plan does not know, or computes across heads.
_REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "bert": ("add_cross_attention",),
    "electra": ("add_cross_attention",),
    "cohere": ("use_qk_norm",),
    "gpt2": ("add_cross_attention", "reorder_and_upcast_attn"),
    "phi": ("qk_layernorm",),
    "roberta": ("add_cross_attention",),
    "stablelm": ("qk_layernorm",),
}


def is_divided(model_type: str) -> bool:
    """Whether a family's layers can be divided among ranks."""
    return model_type in _OWN or model_type in _PLANNED


def divides_experts(model_type: str) -> bool:
    """Whether a family's experts can be divided among ranks by number."""
    return model_type in _MIXTURES


def find_plan(model: nn.Module, shard: Shard) -> Plan:
    """Return how the layers of a model are divided.

    Raises:
        ConfigError: it is not known for the model's family, a switch of its config changes its layers, or its experts
            are to be divided and it has none.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if shard.experts > 1:
        return _plan_by_experts(model, text, shard)
    return _plan_by_matrices(model, text, shard.key)


def _plan_by_experts(model: nn.Module, text: Any, shard: Shard) -> Plan:
    """Return the plan by number of experts."""
    kind = getattr(text, "model_type", None)
    if not count_experts(text):
        raise ConfigError(
            f"zinfer.parallel.expert (ep_size) = {shard.experts}: a {type(model).__name__} has no experts to divide "
            "among ranks; set it to 1 and divide its layers (tensor_parallel.tp_size), or leave both out: the ranks "
            "then share the weights"
        )
    if kind is None or not divides_experts(kind):
        raise ConfigError(
            f"zinfer.parallel.expert (ep_size): how the experts of a {type(model).__name__} are divided is not known; "
            "`zinfer families` lists the families whose experts can be. Leave the key out: the ranks then share the "
            "weights"
        )
    own = _own_words(text.base_model_ep_plan or {}, _KNOWN_OF_EXPERTS, _SAME_OF_EXPERTS, shard.key)
    if shard.within.size > 1:
        of_modules = {path: style for path, style in own.items() if style != BY_NUMBER}
        return {**_plan_by_matrices(model, text, shard.key), **of_modules}
    if is_divided(kind) and can_divide(text, shard.size):
        return {**_plan_by_matrices(model, text, shard.key), **own}
    return {**own, EVERYTHING_ELSE: REPLICATED}


def _plan_by_matrices(model: nn.Module, text: Any, key: str) -> Plan:
    """Return the plan in which each rank has a part of every matrix."""
    kind = getattr(text, "model_type", None)
    if kind is None or not is_divided(kind):
        raise ConfigError(
            f"{key}: how the layers of a {type(model).__name__} are divided is not known; "
            "`zinfer families` lists the families that can be. Leave the key out: the ranks then share the weights"
        )
    for name in _REFUSED.get(kind, ()):
        if getattr(text, name, False):
            raise ConfigError(
                f"{key}: the layers of a {type(model).__name__} are not divided if its config.json "
                f"sets {name}; leave the key out: the ranks then share the weights"
            )
    return plan_of(kind, text, key)


def plan_of(kind: str, text: Any, key: str = "tensor_parallel.tp_size") -> Plan:
    """Return the plan of a family that `is_divided`; ``text`` is the config of a model's text part."""
    plan = dict(_OWN.get(kind, {}))
    if kind == "falcon":
        is_fused = text.multi_query and not text.new_decoder_architecture
        grouped = GROUPED if text.new_decoder_architecture else COLWISE
        plan["self_attention.query_key_value"] = FUSED if is_fused else grouped
    if kind in _PLANNED:
        plan = _own_words(text.base_model_tp_plan or {}, _KNOWN, _SAME, key) | plan
    return plan


def _own_words(stated: Mapping[str, str], known: Container[str], same: Mapping[str, str], key: str) -> dict[str, str]:
    """Return transformers' plan, by paths within a layer, without what it says of other modules."""
    plan = {}
    for path, style in stated.items():
        if "*" in path:
            plan[_LAYER_NUMBER.sub("", path)] = same.get(style, style)
    unknown = sorted({style for style in plan.values() if style not in known})
    if unknown:
        raise ConfigError(
            f"{key}: transformers' plan divides layers by {', '.join(unknown)}, which is not known "
            "here; leave the key out: the ranks then share the weights"
        )
    return plan
