"""Which matrices get which format: names, patterns, and how shapes are grouped."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import ConfigError
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat

EVERYTHING = Quantization((QuantRule(),))
INT8 = QuantFormat(8)
INT4 = QuantFormat(4)

QUANTIZED = [
    "model.layers.3.self_attn.q_proj.weight",
    "model.layers.3.mlp.gate_proj.weight",
    "model.layers.3.mlp.shared_expert.gate_proj.weight",
    "model.layers.3.mlp.experts.7.w1.weight",
    "model.layers.3.mlp.experts.gate_up_proj",
    "model.decoder.layers.0.fc1.weight",
    "model.decoder.project_in.weight",
    "transformer.h.0.attn.c_attn.weight",
    "transformer.h.0.self_attention.query_key_value.weight",
    "gpt_neox.layers.0.attention.dense.weight",
]
KEPT = [
    "model.embed_tokens.weight",
    "model.decoder.embed_positions.weight",
    "transformer.wte.weight",
    "transformer.wpe.weight",
    "transformer.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
    "lm_head.weight",
    "lm_head.decoder.weight",
    "embed_out.weight",
    "score.weight",
    "model.norm.weight",
    "model.layers.3.input_layernorm.weight",
    "model.layers.3.self_attn.q_norm.weight",
    "transformer.h.0.ln_1.weight",
    "model.layers.3.mlp.gate.weight",
    "model.layers.3.block_sparse_moe.gate.weight",
    "model.layers.3.mlp.router.weight",
    "transformer.blocks.3.ffn.router.layer.weight",
    "backbone.layers.0.mixer.A_log",
]
NEVER = [
    "model.layers.3.self_attn.q_proj.bias",
    "model.layers.3.mlp.experts.gate_up_proj_bias",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
]


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_weights_are_quantized(name: str) -> None:
    assert EVERYTHING.format_for(name, 64, 32) == INT8
    assert EVERYTHING.format_for(name, 1, 32) is None
    assert EVERYTHING.format_for(name, 32, 1) is None


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_in_full_precision_unless_it_is_named(name: str) -> None:
    assert EVERYTHING.format_for(name, 64, 32) is None
    path, _, own = name.removesuffix(".weight").removesuffix(".decoder").removesuffix(".layer").rpartition(".")
    assert Quantization((QuantRule(own, bits=4), QuantRule())).format_for(name, 64, 32) == INT4
    assert Quantization((QuantRule(),), include=(own,)).format_for(name, 64, 32) == INT8
    if path:
        assert Quantization((QuantRule(path, bits=4), QuantRule())).format_for(name, 64, 32) is None
        assert Quantization((QuantRule(f"{path}."),)).format_for(name, 64, 32) is None
        assert Quantization((QuantRule(),), include=(path,)).format_for(name, 64, 32) is None


@pytest.mark.parametrize("name", NEVER)
def test_biases_are_never_quantized(name: str) -> None:
    assert EVERYTHING.format_for(name, 64, 32) is None
    for pattern in (name, "bias", "proj"):
        assert Quantization((QuantRule(pattern),)).format_for(name, 64, 32) is None


def test_a_pattern_is_a_part_of_the_modules_name() -> None:
    rules = Quantization((QuantRule("fc1", bits=4), QuantRule("layers.1.self_attn.", group_size=16), QuantRule()))
    assert rules.format_for("model.layers.0.fc1.weight", 64, 32) == INT4
    assert rules.format_for("model.layers.1.self_attn.k_proj.weight", 64, 32) == QuantFormat(8, 16)
    assert rules.format_for("model.layers.11.self_attn.k_proj.weight", 64, 32) == INT8
    assert Quantization((QuantRule("fc1.weight"),)).format_for("layers.0.fc1.weight", 64, 32) == INT8
    only = Quantization((QuantRule("ht"),))
    assert only.format_for("layers.0.fc1.weight", 64, 32) is None, "the word weight belongs to no module"


def test_two_patterns_in_one_name_must_agree() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rules = Quantization((QuantRule("self_attn", bits=4), QuantRule("q_proj", bits=8)))
    with pytest.raises(ConfigError, match=rf'"self_attn" and "q_proj" both occur in {name} and ask for different'):
        rules.format_for(name, 64, 32)
    assert rules.format_for("model.layers.0.self_attn.o_proj.weight", 64, 32) == INT4
    same = Quantization((QuantRule("self_attn", bits=4), QuantRule("q_proj", bits=4)))
    assert same.format_for(name, 64, 32) == INT4


def test_include_limits_the_general_rule_only() -> None:
    rules = Quantization((QuantRule("fc1", bits=4), QuantRule()), include=("self_attn",))
    assert rules.format_for("layers.0.fc1.weight", 64, 32) == INT4
    assert rules.format_for("layers.0.self_attn.q_proj.weight", 64, 32) == INT8
    assert rules.format_for("layers.0.fc2.weight", 64, 32) is None


def test_exclude_comes_before_every_rule() -> None:
    rules = Quantization((QuantRule("fc1", bits=4), QuantRule()), include=("self_attn",), exclude=("layers.0.",))
    assert rules.format_for("layers.0.fc1.weight", 64, 32) is None
    assert rules.format_for("layers.0.self_attn.q_proj.weight", 64, 32) is None
    assert rules.format_for("layers.10.fc1.weight", 64, 32) == INT4
    assert rules.format_for("layers.10.self_attn.q_proj.weight", 64, 32) == INT8


@pytest.mark.parametrize(
    ("name", "is_qkv"),
    [
        *((f"layers.0.self_attn.{part}_proj.weight", part != "o") for part in "qkvo"),
        ("layers.0.self_attn.qkv_proj.weight", True),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("h.0.self_attention.query_key_value.weight", True),
        ("h.0.attn.c_attn.weight", True),
        ("h.0.attn.c_proj.weight", False),
        ("blocks.0.attn.Wqkv.weight", True),
        ("layers.0.mlp.block_proj.weight", False),
    ],
)
def test_queries_keys_and_values_may_be_left_out(name: str, is_qkv: bool) -> None:
    assert Quantization((QuantRule(),), qkv=False).format_for(name, 64, 32) == (None if is_qkv else INT8)
    assert EVERYTHING.format_for(name, 64, 32) == INT8


def test_documents_of_former_stores_are_those_of_the_same_rules() -> None:
    assert "group_dim" not in EVERYTHING.as_document()["rules"][0]
    assert Quantization((QuantRule(group_dim=0),)).as_document()["rules"][0]["group_dim"] == 0


def test_patterns_without_a_match_are_known() -> None:
    rules = Quantization((QuantRule("fc1"), QuantRule("fc3"), QuantRule()), include=("fc", "q_prj"), exclude=("h.9",))
    assert rules.patterns_without_a_match(iter(["h.0.fc1.weight", "h.0.fc2.weight"])) == ("fc3", "q_prj", "h.9")
    assert EVERYTHING.patterns_without_a_match([]) == ()


def test_the_rules_format_is_the_matrixs_format() -> None:
    name = QUANTIZED[0]
    for rule, format in (
        (QuantRule(bits=4, group_size=32, symmetric=False), QuantFormat(4, 32, symmetric=False)),
        (QuantRule(is_float=True), QuantFormat(8, is_float=True)),
        (QuantRule(num_groups=1), QuantFormat(8, group_rows=None)),
        (QuantRule(num_groups=64), QuantFormat(8)),
        (QuantRule(num_groups=16, is_float=True), QuantFormat(8, is_float=True, group_rows=4)),
        (QuantRule(bits=4, num_groups=128), QuantFormat(4, 64)),
    ):
        assert Quantization((rule,)).format_for(name, 64, 128) == format


def test_extra_grouping_doubles_the_groups_of_mlps() -> None:
    rule = QuantRule(num_groups=8, mlp_extra_grouping=True)
    assert rule.format_for("fc1", 128, 32).group_rows == 8
    assert rule.format_for("fc2", 32, 128).group_rows == 2
    assert rule.format_for("out_proj", 32, 32).group_rows == 4


@given(st.integers(2, 400), st.integers(1, 500))
def test_the_nearest_sizes_are_named(columns: int, group_size: int) -> None:
    rule = QuantRule(group_size=group_size, origin=f"zinfer.quantization.group_size = {group_size}")
    if columns % group_size == 0:
        assert rule.format_for("fc1.weight", 8, columns) == QuantFormat(8, group_size)
        return
    with pytest.raises(ConfigError) as refused:
        rule.format_for("fc1.weight", 8, columns)
    divisors = [size for size in range(1, columns + 1) if columns % size == 0]
    below = max(size for size in divisors if size < group_size)
    above = min((size for size in divisors if size > group_size), default=None)
    nearest = (
        f"the largest that does is {below}" if above is None else f"the nearest sizes that do are {below} and {above}"
    )
    assert str(refused.value) == (
        f"zinfer.quantization.group_size = {group_size} does not divide the {columns} columns of fc1.weight; "
        f"{nearest}; or leave the parameter out (zinfer.quantization.exclude)"
    )


@st.composite
def matrices_and_groups(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    rows, columns = draw(st.integers(2, 24)), draw(st.integers(2, 24))
    even = [count for count in range(1, rows * columns + 1) if rows * columns % count == 0]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.randn(rows, columns, generator=generator), draw(st.sampled_from(even))


@given(matrices_and_groups(), st.sampled_from([4, 8]), st.booleans())
def test_groups_are_those_of_the_whole_matrix_row_after_row(
    case: tuple[torch.Tensor, int], bits: int, symmetric: bool
) -> None:
    weight, num_groups = case
    rows, columns = weight.shape
    rule = QuantRule(bits=4 if bits == 4 else 8, symmetric=symmetric, num_groups=num_groups)
    if rows % num_groups and num_groups % rows:
        with pytest.raises(
            ConfigError, match=rf"fc1.weight \[{rows}, {columns}\] cannot be cut into {num_groups} groups"
        ):
            rule.format_for("fc1.weight", rows, columns)
        return
    format = rule.format_for("fc1.weight", rows, columns)
    ours = quantize(weight, format)
    theirs = quantize(weight.view(num_groups, -1), QuantFormat(rule.bits, symmetric=symmetric))
    assert torch.equal(_for_each_element(ours.scales, weight), _for_each_element(theirs.scales, weight))
    if ours.zeros is not None and theirs.zeros is not None:
        assert torch.equal(_for_each_element(ours.zeros, weight), _for_each_element(theirs.zeros, weight))
    assert (ours.zeros is None) == (theirs.zeros is None) == symmetric


def _for_each_element(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A value a group, in the shape of the weight."""
    return values.reshape(-1, 1).expand(-1, weight.numel() // values.numel()).reshape(weight.shape)


def test_groups_that_do_not_fit_are_refused() -> None:
    rule = QuantRule(num_groups=10, origin="quant.q_groups = 10")
    with pytest.raises(ConfigError, match=r"^quant\.q_groups = 10: fc1\.weight \[4, 5\] cannot be cut into 10 groups"):
        rule.format_for("fc1.weight", 4, 5)
    with pytest.raises(ConfigError, match=r"\[5, 7\] cannot be cut"):
        rule.format_for("fc1.weight", 5, 7)
    assert rule.format_for("fc1.weight", 5, 8) == QuantFormat(8, 4)


def test_quantized_activations_take_one_scale_a_row() -> None:
    rules = Quantization((QuantRule(num_groups=8, origin="quant.q_groups = 8"),), activations=True)
    assert rules.format_for("fc1.weight", 16, 32) == QuantFormat(8, group_rows=2)
    with pytest.raises(
        ConfigError, match=r"^quant\.q_groups = 8: fc1\.weight \[4, 32\] would have several scales a row"
    ):
        rules.format_for("fc1.weight", 4, 32)
