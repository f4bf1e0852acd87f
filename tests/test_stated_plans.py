"""Configurations that state how layers are divided: for families without a plan, or in agreement with one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_mixtral, tiny_model
from ranks_support import run_ranks
from test_tensor_parallel import IDS, check_alike, computed, config
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    PreTrainedModel,
)

from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.sharding import Sharding

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
LLAMA = [
    {"patterns": [r".*\.self_attn\.o_proj\.weight$", r".*\.mlp\.down_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
]
PACKED = {"patterns": [r".*\.gate_up_proj\.weight$"], "shape": [2, -1], "partition_dim": 0}
GATED = {"patterns": [r".*\.mlp\.(up|gate)_proj$"]}


def specs(*specs: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"partition_config": {"layer_specs": list(specs), **more}}


def without_plans() -> dict[str, tuple[PreTrainedModel, dict[str, Any]]]:
    """Models of families that have no plan here, with what divides them: separate, packed and interleaved products."""
    torch.manual_seed(0)
    grouped = SHAPE | {"num_key_value_heads": 2, "head_dim": 16}
    interleaved = {"patterns": [r".*\.query_key_value", r".*\.dense_h_to_4h"]}
    after = {"patterns": [r".*\.self_attn\.dense\.", r".*\.dense_4h_to_h"], "partition_type": "ROW"}
    opt_like = specs(
        {"patterns": [r".*\.(out_proj|fc2)$"], "partition_type": "row", "model_types": ["BioGPT"]},
        {"patterns": [r".*\.(out_proj|fc2)$"], "partition_type": "skip", "model_types": ["other"]},
        {"patterns": [r".*"]},
    )
    return {
        "helium": (HeliumForCausalLM(HeliumConfig(**grouped)), {"preset_model": "Llama"}),
        "glm": (GlmForCausalLM(GlmConfig(**grouped)), specs(PACKED) | {"preset_model": "llama"}),
        "persimmon": (PersimmonForCausalLM(PersimmonConfig(**SHAPE)), specs(interleaved, after)),
        "biogpt": (BioGptForCausalLM(BioGptConfig(**SHAPE, max_position_embeddings=32)), opt_like),
    }


def test_families_without_a_plan_are_divided_as_stated(tmp_path: Path) -> None:
    models = without_plans()
    for name, (model, _) in models.items():
        model.eval().save_pretrained(tmp_path / name)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    alone = computed(0, [(tmp_path / name, config(1), inputs) for name in models])
    jobs = [
        (tmp_path / name, config(2) | {"tensor_parallel": {"tp_size": 2} | own}, inputs)
        for name, (_, own) in models.items()
    ]
    several = run_ranks(2, computed, jobs)
    check_alike(several, alone, [*models])
    for at in range(len(models)):
        assert all(ranks[at][2].loaded_bytes < 0.62 * alone[at][2].loaded_bytes for ranks in several)


def divide(model: PreTrainedModel, section: dict[str, Any]) -> Sharding:
    return Sharding.of(model, Shard(0, 2), stated=resolve_settings({"tensor_parallel": section}).tensor_parallel)


def test_families_with_a_plan_keep_it() -> None:
    model = tiny_model("llama", num_layers=1)
    own = Sharding.of(model, Shard(0, 2)).cuts
    for section in ({"preset_model": "qwen2"}, specs(*LLAMA, GATED), specs(*LLAMA), specs()):
        assert divide(model, section).cuts == own
    divide(tiny_mixtral(), {"preset_model": "mixtral"} | specs(*LLAMA[1:]))
    for section, message in (
        (specs({"patterns": [r".*\.up_proj$"], "partition_type": "row"}), r"mlp.up_proj by row, but .* says column"),
        (specs({"patterns": [r".*k_proj"], "partition_type": "skip"}), "self_attn.k_proj by skip, but .* says column"),
        (specs({"patterns": ["lm_head"]}), "partition_config matches no linear layer"),
        ({"preset_model": "bloom"}, "preset_model matches no linear layer of the model; leave the key out"),
        ({"preset_model": "chatglm"}, "preset_model = chatglm: no family of that name has a plan; `zinfer families`"),
    ):
        with pytest.raises(ConfigError, match=message):
            divide(model, section)


def test_what_a_stated_plan_lacks_is_named() -> None:
    models = {name: model for name, (model, _) in without_plans().items()}
    for name, section, message in (
        ("glm", specs(*LLAMA), "does not say how model.layers.0.mlp.gate_up_proj.weight is divided; add a spec"),
        ("glm", specs(PACKED, use_default_specs=False) | {"preset_model": "llama"}, "does not say how .*self_attn.q"),
        (
            "persimmon",
            specs({"patterns": [".*query_key_value"], "shape": [[64, 32, 96], -1]}, {"patterns": [".*dense"]}),
            "query_key_value has 192 outputs, stated as parts of 64, 32, 96, but .* they are 64, 64, 64; correct shape",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            divide(models[name], section)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"patterns": ["("]}, r'layer_specs\[0\].patterns = "\(": expected a regular expression \(missing'),
        ({"patterns": "a"}, r'layer_specs\[0\].patterns = "a": expected a list of texts'),
        ({"patterns": ["a"], "partition_type": "rows"}, r'partition_type = "rows": expected "column", "row" or "skip"'),
        ({"patterns": ["a"], "partition_dim": 1}, "partition_dim = 1: a column spec divides dimension 0 of"),
        ({"patterns": ["a"], "shape": [8, -1, 64]}, r"shape = \[8, -1, 64\]: only outputs in parts are divided, as "),
        ({"patterns": ["a"], "shape": [4, -1]}, "outputs lie in two parts"),
        ({"pattern": ["a"]}, r"layer_specs\[0\].pattern = .*: expected one of patterns, partition_type, shape"),
    ],
)
def test_what_cannot_be_a_spec_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings({"tensor_parallel": specs(spec)})
