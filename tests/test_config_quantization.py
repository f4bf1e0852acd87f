"""Every spelling of quantized weights resolves to one meaning; those that disagree are refused, naming both."""

from typing import Any

import pytest
import torch

from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.quantization import Quantization, QuantizationConfig, QuantRule

GROUPS = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
INT4_GROUPS = QuantRule(bits=4, group_size=64, symmetric=False)


def _general(**stated: Any) -> Quantization:
    return Quantization((QuantRule(**stated),))


def _resolved(config: dict[str, Any]) -> Quantization | None:
    return resolve_settings(config).quantization


def _refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve_settings(config)
    return str(refused.value)


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
    assert _resolved(
        {"dtype": "int8", "quantization_setting": (True, 8), "quant": {"q_type": "asymmetric"}}
    ) == _general(symmetric=False, num_groups=8, mlp_extra_grouping=True)
    own = {"group_size": 32, "exclude": ["fc2"]}
    assert _resolved({"zero": {"zero_quantized_weights": True}, "zinfer": {"quantization": own}}) == Quantization(
        (QuantRule(group_size=32),), exclude=("fc2",)
    )
    same = {"quant": {"num_bits": 4, "q_bits": 4}, "weight_quantization": {"num_bits": 4}}
    assert _resolved({**same, "zinfer": {"quantization": {"bits": 4}}}) == _general(bits=4)


def test_own_section_may_stand_alone_as_a_keyword_argument() -> None:
    own = {"bits": 4, "group_size": 64}
    assert resolve_settings(kwargs={"quantization": own}) == resolve_settings({"zinfer": {"quantization": own}})
    assert _refusal({"quantization": own}) == "unknown key quantization; it belongs in zinfer.quantization"


def test_formats_by_pattern() -> None:
    by_name = {"fc": GROUPS, "self_attn.q_proj": {"num_bits": 8}}
    rules = (QuantRule("fc", 4, 64, symmetric=False), QuantRule("self_attn.q_proj", 8))
    assert _resolved({"weight_quantization": {"post_init_quant": by_name}}) == Quantization(rules)
    assert _resolved({"quant": {"weight": {"post_init_quant": by_name}}}) == Quantization(rules)
    both = {"weight_quantization": {"post_init_quant": by_name}, "quant": {"weight": {"post_init_quant": by_name}}}
    assert _resolved(both) == Quantization(rules)
    assert _resolved({"dtype": "int8", **both}) == Quantization((*rules, QuantRule()))


def test_queries_keys_and_values_may_be_left_out() -> None:
    config = {"dtype": "int8", "quant": {"qkv": {"enabled": False}}}
    assert _resolved(config) == Quantization((QuantRule(),), qkv=False)
    assert _resolved({"dtype": "int8", "quant": {"qkv": {"enabled": True}}}) == _general()


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
    assert _resolved(config) == Quantization((QuantRule(),), activations=True)


def test_quantized_activations_of_some_matrices() -> None:
    by_name = {"weight_quantization": {"post_init_quant": {"fc": {"num_bits": 8}}}}
    assert _resolved({**by_name, "zinfer": {"quantization": {"activations": True}}}) == Quantization(
        (QuantRule("fc"),), activations=True
    )


QUANT4 = {"weight": {"num_bits": 4}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"dtype": "int8", "quant": QUANT4},
            'dtype = "int8" (config) contradicts quant.weight.num_bits = 4 (config): '
            "both say how many bits a quantized weight has; keep one of them",
        ),
        (
            {"quant": {"num_bits": 4, "q_bits": 8}},
            "quant.num_bits = 4 (config) contradicts quant.q_bits = 8 (config): ",
        ),
        (
            {"weight_quantization": {"num_bits": 8}, "zinfer": {"quantization": {"bits": 4}}},
            "weight_quantization.num_bits = 8 (config) contradicts zinfer.quantization.bits = 4 (config): ",
        ),
        (
            {"weight_quantization": {"num_bits": 8, "quantized_initialization": GROUPS}},
            "weight_quantization.num_bits = 8 (config) contradicts "
            "weight_quantization.quantized_initialization.num_bits = 4 (config): ",
        ),
        (
            {"zero": {"zero_quantized_weights": True}, "quant": {"q_bits": 4}},
            "zero.zero_quantized_weights = true (config) contradicts quant.q_bits = 4 (config): ",
        ),
        (
            {"quant": {"q_type": "symmetric"}, "zinfer": {"quantization": {"symmetric": False}}},
            'quant.q_type = "symmetric" (config) contradicts zinfer.quantization.symmetric = false (config): '
            "both say whether quantized weights have zero points",
        ),
        (
            {"quant": {"q_groups": 8}, "quantization_setting": (True, 8)},
            "quant.q_groups = 8 (config) contradicts quantization_setting = [true, 8] (config): "
            "both say which elements share a scale",
        ),
        (
            {"quant": {"q_groups": 8}, "zinfer": {"quantization": {"group_size": 64}}},
            "quant.q_groups = 8 (config) contradicts zinfer.quantization.group_size = 64 (config): ",
        ),
        (
            {"zinfer": {"quantization": {"format": "fp8", "bits": 4}}},
            'zinfer.quantization.format = "fp8" (config) contradicts zinfer.quantization.bits = 4 (config): ',
        ),
        (
            {"zinfer": {"quantization": {"format": "fp8", "symmetric": False}}},
            'zinfer.quantization.format = "fp8" (config) contradicts zinfer.quantization.symmetric = false (config): ',
        ),
        (
            {"dtype": "int8", "zinfer": {"quantization": {"format": "fp8"}}},
            'dtype = "int8" (config) contradicts zinfer.quantization.format = "fp8" (config): '
            "both say whether quantized weights are whole numbers",
        ),
        (
            {
                "weight_quantization": {"post_init_quant": {"fc": {"num_bits": 4}}},
                "quant": {"weight": {"post_init_quant": {"fc": {"num_bits": 8}}}},
            },
            'weight_quantization.post_init_quant = {"fc": {"num_bits": 4}} (config) contradicts '
            'quant.weight.post_init_quant = {"fc": {"num_bits": 8}} (config): both say the format of "fc"; ',
        ),
        (
            {"quant": {"activation": {"enabled": False}}, "zinfer": {"quantization": {"activations": True}}},
            "zinfer.quantization.activations = true (config) contradicts quant.activation.enabled = false (config): ",
        ),
        (
            {"quant": {"activation": {"num_bits": 8}}, "zinfer": {"quantization": {"activations": False}}},
            "quant.activation.num_bits = 8 (config) contradicts zinfer.quantization.activations = false (config): ",
        ),
        (
            {"quant": {"activation": {"enabled": True}, "weight": {"enabled": False}}},
            "quant.activation.enabled = true (config) contradicts quant.weight.enabled = false (config): "
            "activations are quantized beside INT8 weights only",
        ),
        (
            {"quant": {"activation": {"enabled": True}, **QUANT4}},
            "quant.activation.enabled = true (config) contradicts quant.weight.num_bits = 4 (config): "
            "quantized activations need weights of 8 bits, symmetric, whole numbers, without group_size",
        ),
        *(
            (
                {"zinfer": {"quantization": {"activations": True, name: value}}},
                f"zinfer.quantization.activations = true (config) contradicts zinfer.quantization.{name} = ",
            )
            for name, value in (("bits", 4), ("symmetric", False), ("format", "fp8"), ("group_size", 64))
        ),
        (
            {
                "weight_quantization": {"post_init_quant": {"fc": {"num_bits": 4}}},
                "zinfer": {"quantization": {"activations": True}},
            },
            "zinfer.quantization.activations = true (config) contradicts weight_quantization.post_init_quant = ",
        ),
    ],
)
def test_disagreements_name_both_sides(config: dict[str, Any], message: str) -> None:
    assert _refusal(config).startswith(message)


def test_disagreements_between_config_and_keyword_arguments() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"dtype": "int8"}, {"quantization": {"bits": 4}})
    assert str(refused.value).startswith(
        'dtype = "int8" (config) contradicts quantization.bits = 4 (keyword arguments)'
    )
    with pytest.raises(ConfigError, match=r"^quant\.q_groups is given twice with different values: "):
        resolve_settings({"quant": {"q_groups": 8}}, {"quant": {"q_groups": 4}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            (config, f"{path} = 3: expected 4 or 8")
            for config, path in (
                ({"quant": {"num_bits": 3}}, "quant.num_bits"),
                ({"quant": {"q_bits": 3}}, "quant.q_bits"),
                ({"quant": QuantizationConfig(q_bits=3)}, "quant.q_bits"),
                ({"quantization_setting": QuantizationConfig(q_bits=3)}, "quantization_setting.q_bits"),
                ({"quant": {"weight": {"num_bits": 3}}}, "quant.weight.num_bits"),
                ({"weight_quantization": {"num_bits": 3}}, "weight_quantization.num_bits"),
                (
                    {"weight_quantization": {"quantized_initialization": {"num_bits": 3}}},
                    "weight_quantization.quantized_initialization.num_bits",
                ),
                (
                    {"weight_quantization": {"post_init_quant": {"fc1": {"num_bits": 3}}}},
                    "weight_quantization.post_init_quant.fc1.num_bits",
                ),
                ({"zinfer": {"quantization": {"bits": 3}}}, "zinfer.quantization.bits"),
            )
        ),
        ({"quant": {"num_bits": True}}, "quant.num_bits = true: expected 4 or 8"),
        ({"quant": {"q_type": "sym"}}, 'quant.q_type = "sym": expected one of "symmetric", "asymmetric"'),
        (
            {"quantization_setting": QuantizationConfig(q_type="sym")},
            'quantization_setting.q_type = "sym": expected one of "symmetric", "asymmetric"',
        ),
        ({"quant": {"q_groups": 0}}, "quant.q_groups = 0: expected a whole number of at least 1"),
        ({"quant": True}, "quant = true: expected an object {...}"),
        ({"quant": {"enabled": 1}}, "quant.enabled = 1: expected true or false"),
        *(
            ({"quantization_setting": value}, f"quantization_setting = {text}: expected a number of groups, or (mlp_")
            for value, text in ((0, 0), (2.5, 2.5), ((8, True), "[8, true]"), ([True], "[true]"), ("8", '"8"'))
        ),
        (
            {"zinfer": {"quantization": {"group_size": 0}}},
            "zinfer.quantization.group_size = 0: expected a whole number of at least 1",
        ),
        (
            {"weight_quantization": {"post_init_quant": {"fc1": {"group_size": 0}}}},
            "weight_quantization.post_init_quant.fc1.group_size = 0: expected a whole number of at least 1",
        ),
        (
            {"weight_quantization": {"quantized_initialization": {**GROUPS, "group_dim": 0}}},
            "weight_quantization.quantized_initialization.group_dim = 0: expected 1: neighbouring columns share a ",
        ),
        (
            {"weight_quantization": {"post_init_quant": {"fc1": {**GROUPS, "group_dim": 0}}}},
            "weight_quantization.post_init_quant.fc1.group_dim = 0: expected 1: ",
        ),
        (
            {"weight_quantization": {"post_init_quant": {"fc1": {"num_bit": 4}}}},
            "weight_quantization.post_init_quant.fc1.num_bit = 4: expected one of the keys num_bits, group_size, ",
        ),
        (
            {"weight_quantization": {"post_init_quant": {"fc1": 4}}},
            "weight_quantization.post_init_quant.fc1 = 4: expected an object {...}",
        ),
        (
            {"weight_quantization": {"post_init_quant": {"layers.*.fc1": {}}}},
            'weight_quantization.post_init_quant.layers.*.fc1 = "layers.*.fc1": expected a part of parameter names',
        ),
        ({"weight_quantization": {"post_init_quant": ["fc1"]}}, 'weight_quantization.post_init_quant = ["fc1"]: expe'),
        ({"zinfer": {"quantization": {"include": "fc1"}}}, 'zinfer.quantization.include = "fc1": expected a list of '),
        (
            {"zinfer": {"quantization": {"exclude": ["a", ""]}}},
            'zinfer.quantization.exclude.1 = "": expected a part of',
        ),
        (
            {"zinfer": {"quantization": {"format": "fp4"}}},
            'zinfer.quantization.format = "fp4": expected one of "int", ',
        ),
        ({"zinfer": {"quantization": {"search": "mse"}}}, 'zinfer.quantization.search = "mse": expected one of "none"'),
        ({"zero": {"zero_quantized_weights": 8}}, "zero.zero_quantized_weights = 8: expected true or false"),
        *(
            (
                {"quant": {"activation": {name: value}}},
                f"quant.activation.{name} = {text}: activations are quantized to 8",
            )
            for name, value, text in (("num_bits", 4, 4), ("q_type", "asymmetric", '"asymmetric"'), ("q_groups", 8, 8))
        ),
        ({"dtype": "int4"}, 'dtype = "int4": expected a torch dtype, "fp16", "bf16", "fp32" or "int8"'),
        (
            {"quant": {"weight": {"q_grups": 1}}},
            "unknown key quant.weight.q_grups; did you mean quant.weight.q_groups?",
        ),
        (
            {"zinfer": {"quantization": {"groupsize": 1}}},
            "unknown key zinfer.quantization.groupsize; did you mean zinfer",
        ),
    ],
)
def test_bad_values_name_their_key(config: dict[str, Any], message: str) -> None:
    assert _refusal(config).startswith(message)


def test_a_shape_that_cannot_be_grouped_names_the_key_as_it_was_written() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for config, key in (
        ({"zinfer": {"quantization": {"group_size": 64}}}, "zinfer.quantization.group_size = 64"),
        (
            {"weight_quantization": {"post_init_quant": {"mlp": {"group_size": 64}}}},
            "weight_quantization.post_init_quant.mlp.group_size = 64",
        ),
        ({"quantization_setting": (False, 7)}, "quantization_setting = [false, 7]"),
    ):
        quantization = _resolved(config)
        assert quantization is not None
        with pytest.raises(ConfigError) as refused:
            quantization.format_for(name, 96, 100)
        assert str(refused.value).startswith(key)
        assert name in str(refused.value)
