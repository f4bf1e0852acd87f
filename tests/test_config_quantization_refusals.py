"""What a configuration may not say about quantized weights: disagreements and bad values, each with its key."""

from typing import Any

import pytest
from config_support import refusal, resolved

from zinfer.config import resolve_settings
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.errors import ConfigError

GROUPS = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
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
            "activations are quantized only with weights of 8 bits",
        ),
        (
            {"quant": {"activation": {"enabled": True}, **QUANT4}},
            "quant.activation.enabled = true (config) contradicts quant.weight.num_bits = 4 (config): "
            "quantized activations need symmetric weights of 8 bits without group_size",
        ),
        *(
            (
                {"zinfer": {"quantization": {"activations": True, name: value}}},
                f"zinfer.quantization.activations = true (config) contradicts zinfer.quantization.{name} = ",
            )
            for name, value in (("bits", 4), ("symmetric", False), ("group_size", 64))
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
    assert refusal(config).startswith(message)


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
        ({"quant": {"enabled": 2}}, "quant.enabled = 2: expected true or false"),
        *(
            ({"quantization_setting": value}, f"quantization_setting = {text}: expected a number of groups, or (mlp_")
            for value, text in ((0, 0), (2.5, 2.5), ((8, 8), "[8, 8]"), ([True], "[true]"), ("eight", '"eight"'))
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
            {"weight_quantization": {"quantized_initialization": {**GROUPS, "group_dim": 2}}},
            "weight_quantization.quantized_initialization.group_dim = 2: expected a whole number from 0 to 1",
        ),
        (
            {"weight_quantization": {"post_init_quant": {"fc1": {**GROUPS, "group_dim": -1}}}},
            "weight_quantization.post_init_quant.fc1.group_dim = -1: expected a whole number from 0 to 1",
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
    assert refusal(config).startswith(message)


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
        quantization = resolved(config)
        assert quantization is not None
        with pytest.raises(ConfigError) as refused:
            quantization.format_for(name, 96, 100)
        assert str(refused.value).startswith(key)
        assert name in str(refused.value)
