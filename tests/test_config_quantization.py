"""Every spelling of quantized weights resolves to one meaning."""

from typing import Any

import pytest
import torch
from config_support import refusal, resolved

from zinfer.config import resolve_settings
from zinfer.config.quantization_rules import Quantization, QuantizationConfig, QuantRule

GROUPS = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
INT4_GROUPS = QuantRule(bits=4, group_size=64, symmetric=False)


def _general(**stated: Any) -> Quantization:
    return Quantization((QuantRule(**stated),))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "int8"}, _general()),
        ({"dtype": "torch.int8"}, _general()),
        ({"dtype": torch.int8}, _general()),
        ({"quant": {"enabled": True}}, _general()),
        ({"quant": {"weight": {"enabled": True}}}, _general()),
        ({"quant": {"qkv": {"enabled": True}}}, _general()),
        ({"quant": {"num_bits": 4}}, _general(bits=4)),
        (
            {"quant": {"q_bits": 4, "q_type": "asymmetric", "q_groups": 8}},
            _general(bits=4, symmetric=False, num_groups=8),
        ),
        ({"quant": QuantizationConfig(4, "asymmetric", 8)}, _general(bits=4, symmetric=False, num_groups=8)),
        ({"quant": QuantizationConfig()}, _general()),
        ({"quant": {"weight": {"num_bits": 8, "q_type": "symmetric", "q_groups": 1}}}, _general(num_groups=1)),
        ({"quant": {"weight": {"q_bits": 4}}}, _general(bits=4)),
        ({"quant": {"weight": {"quantized_initialization": GROUPS}}}, Quantization((INT4_GROUPS,))),
        ({"quantization_setting": 16}, _general(num_groups=16)),
        ({"quantization_setting": (True, 8)}, _general(num_groups=8, mlp_extra_grouping=True)),
        ({"quantization_setting": [False, 8]}, _general(num_groups=8)),
        ({"quantization_setting": (8, True)}, _general(num_groups=8, mlp_extra_grouping=True)),
        ({"quantization_setting": QuantizationConfig(q_bits=4, q_groups=2)}, _general(bits=4, num_groups=2)),
        ({"weight_quantization": {"num_bits": 4, "q_type": "asymmetric"}}, _general(bits=4, symmetric=False)),
        ({"weight_quantization": {"quantized_initialization": GROUPS}}, Quantization((INT4_GROUPS,))),
        ({"zero": {"zero_quantized_weights": True}}, _general()),
        ({"zero": {"zero_quantized_nontrainable_weights": True}}, _general()),
        ({"zinfer": {"quantization": {"bits": 4, "group_size": 128}}}, _general(bits=4, group_size=128)),
        ({"zinfer": {"quantization": {"bits": 4.0, "symmetric": False}}}, _general(bits=4, symmetric=False)),
        ({"zinfer": {"quantization": {"format": "int"}}}, _general()),
        ({"zinfer": {"quantization": {"format": "fp8"}}}, _general(is_float=True)),
        ({"zinfer": {"quantization": {"include": ["fc1"]}}}, Quantization((QuantRule(),), include=("fc1",))),
        (
            {"zinfer": {"quantization": {"bits": 8, "exclude": ["fc1", "h.0."], "search": "clip"}}},
            Quantization((QuantRule(),), exclude=("fc1", "h.0."), search="clip"),
        ),
    ],
    ids=str,
)
def test_each_spelling_alone(config: dict[str, Any], expected: Quantization) -> None:
    settings = resolve_settings(config)
    assert settings.quantization == expected
    assert settings.dtype is None
    assert settings.without_effect == ()
    assert resolve_settings(kwargs=config) == settings == resolve_settings(config, config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "fp16"},
        {"quant": False},
        {"quant": {}},
        {"quant": {"weight": {}, "activation": {}, "qkv": {}}},
        {"quant": {"enabled": False, "num_bits": 4, "activation": {"num_bits": 4}, "qkv": {"enabled": False}}},
        {"quant": {"enabled": True, "num_bits": 4, "weight": {"enabled": False, "q_groups": 4}}},
        {"quant": {"activation": {"enabled": False, "num_bits": 8}}},
        {"weight_quantization": {"enabled": False, "quantized_initialization": GROUPS}},
        {"weight_quantization": {"post_init_quant": {}, "quantized_initialization": {}}},
        {"zero": {"zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False}},
        {"quantization_setting": None},
        {"zinfer": {"quantization": {"bits": None, "include": [], "exclude": []}}},
    ],
    ids=str,
)
def test_what_asks_for_nothing(config: dict[str, Any]) -> None:
    settings = resolve_settings(config)
    assert settings.quantization is None
    assert settings.without_effect == ()


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"zinfer": {"quantization": {"exclude": ["fc1"]}}}, "zinfer.quantization.exclude"),
        ({"zinfer": {"quantization": {"search": "clip"}}}, "zinfer.quantization.search"),
        ({"zinfer": {"quantization": {"activations": False}}}, "zinfer.quantization.activations"),
        ({"quant": {"qkv": {"enabled": False}}}, "quant.qkv.enabled"),
    ],
)
def test_what_only_modifies_is_listed_where_nothing_is_quantized(config: dict[str, Any], path: str) -> None:
    settings = resolve_settings(config)
    assert settings.quantization is None
    assert [ignored.path for ignored in settings.without_effect] == [path]
    assert resolve_settings(config, {"zinfer": {"quantization": {"bits": 8}}}).without_effect == ()


def test_int8_leaves_the_dtype_to_the_other_keys() -> None:
    settings = resolve_settings({"dtype": "int8", "bf16": {"enabled": True}})
    assert settings.dtype is torch.bfloat16
    assert settings.quantization == _general()
    settings = resolve_settings({"dtype": "fp16", "quant": {"num_bits": 8}})
    assert settings.dtype is torch.float16
    assert settings.quantization == _general()


def test_keys_that_say_different_things_add_up() -> None:
    assert resolved(
        {"dtype": "int8", "quantization_setting": (True, 8), "quant": {"q_type": "asymmetric"}}
    ) == _general(symmetric=False, num_groups=8, mlp_extra_grouping=True)
    own = {"group_size": 32, "exclude": ["fc2"]}
    assert resolved({"zero": {"zero_quantized_weights": True}, "zinfer": {"quantization": own}}) == Quantization(
        (QuantRule(group_size=32),), exclude=("fc2",)
    )
    same = {"quant": {"num_bits": 4, "q_bits": 4}, "weight_quantization": {"num_bits": 4}}
    assert resolved({**same, "zinfer": {"quantization": {"bits": 4}}}) == _general(bits=4)


def test_own_section_may_stand_alone_as_a_keyword_argument() -> None:
    own = {"bits": 4, "group_size": 64}
    assert resolve_settings(kwargs={"quantization": own}) == resolve_settings({"zinfer": {"quantization": own}})
    assert refusal({"quantization": own}) == "unknown key quantization; it belongs in zinfer.quantization"


def test_formats_by_pattern() -> None:
    by_name = {"fc": GROUPS, "self_attn.q_proj": {"num_bits": 8}}
    rules = (QuantRule("fc", 4, 64, symmetric=False), QuantRule("self_attn.q_proj", 8))
    assert resolved({"weight_quantization": {"post_init_quant": by_name}}) == Quantization(rules)
    assert resolved({"quant": {"weight": {"post_init_quant": by_name}}}) == Quantization(rules)
    both = {"weight_quantization": {"post_init_quant": by_name}, "quant": {"weight": {"post_init_quant": by_name}}}
    assert resolved(both) == Quantization(rules)
    assert resolved({"dtype": "int8", **both}) == Quantization((*rules, QuantRule()))


def test_queries_keys_and_values_may_be_left_out() -> None:
    config = {"dtype": "int8", "quant": {"qkv": {"enabled": False}}}
    assert resolved(config) == Quantization((QuantRule(),), qkv=False)
    assert resolved({"dtype": "int8", "quant": {"qkv": {"enabled": True}}}) == _general()


@pytest.mark.parametrize(
    "config",
    [
        {"quant": {"activation": {"enabled": True}}},
        {"quant": {"activation": {"num_bits": 8, "q_type": "symmetric", "q_groups": 1}}},
        {"zinfer": {"quantization": {"activations": True}}},
        {"dtype": "int8", "quant": {"weight": {"enabled": False}, "activation": {"enabled": True}}},
        {"quant": {"activation": {"enabled": True}}, "zinfer": {"quantization": {"activations": True, "bits": 8}}},
    ],
    ids=str,
)
def test_quantized_activations(config: dict[str, Any]) -> None:
    assert resolved(config) == Quantization((QuantRule(),), activations=True)


def test_activations_are_fp8_where_the_weights_are() -> None:
    config = {"zinfer": {"quantization": {"activations": True, "format": "fp8"}}}
    assert resolved(config) == Quantization((QuantRule(is_float=True),), activations=True)


def test_quantized_activations_of_some_matrices() -> None:
    by_name = {"weight_quantization": {"post_init_quant": {"fc": {"num_bits": 8}}}}
    assert resolved({**by_name, "zinfer": {"quantization": {"activations": True}}}) == Quantization(
        (QuantRule("fc"),), activations=True
    )
