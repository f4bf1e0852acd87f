"""The table of keys: complete against DeepSpeed's surface, consistent in itself and with the settings' defaults."""

import re
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from zinfer.config import Settings, resolve_settings
from zinfer.config.key import Key, Status
from zinfer.config.keys import BY_NAME, BY_PATH, KEYS
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.errors import ConfigError

SECTIONS = {
    "tensor_parallel": ["tp"],
    "checkpoint_config": ["ckpt_config"],
    "zero_optimization": ["zero"],
    "zero_optimization.offload_param": [],
    "zero_optimization.leaf_module": [],
    "aio": [],
    "fp16": [],
    "bf16": [],
    "zinfer": [],
    "quant": [],
    "quant.activation": [],
    "quant.weight": [],
    "quant.qkv": [],
    "weight_quantization": [],
    "weight_quantization.quantized_initialization": [],
    "zinfer.quantization": [],
    "moe": [],
}
SUPPORTED = {
    "dtype": [],
    "checkpoint": [],
    "base_dir": [],
    "max_out_tokens": ["max_tokens"],
    "min_out_tokens": ["min_tokens"],
    "zero_optimization.stage": [],
    "zero_optimization.offload_param.device": [],
    "zero_optimization.offload_param.nvme_path": [],
    "zero_optimization.offload_param.pin_memory": [],
    "zero_optimization.offload_param.buffer_count": [],
    "zero_optimization.offload_param.max_in_cpu": [],
    "zero_optimization.stage3_prefetch_bucket_size": ["prefetch_bucket_size"],
    "zero_optimization.stage3_max_live_parameters": ["max_live_parameters"],
    "aio.block_size": [],
    "aio.queue_depth": [],
    "aio.intra_op_parallelism": [],
    "aio.thread_count": [],
    "aio.use_gds": [],
    "zero_optimization.offload_param.buffer_size": [],
    "fp16.enabled": [],
    "bf16.enabled": [],
    "zinfer.max_device_memory": [],
    "zinfer.max_weight_memory": [],
    "zinfer.max_host_memory": [],
    "zinfer.max_pinned_memory": [],
    "zinfer.num_slots": [],
    "zinfer.synchronous": [],
    "zinfer.device": [],
    "quant.enabled": [],
    "quant.q_bits": [],
    "quant.q_type": [],
    "quant.q_groups": [],
    "quant.weight.num_bits": [],
    "quant.activation.enabled": [],
    "quant.qkv.enabled": [],
    "quantization_setting": [],
    "zero_optimization.zero_quantized_weights": [],
    "weight_quantization.post_init_quant": [],
    "weight_quantization.quantized_initialization.num_bits": [],
    "weight_quantization.quantized_initialization.group_size": [],
    "weight_quantization.quantized_initialization.group_dim": [],
    "weight_quantization.quantized_initialization.symmetric": [],
    "zinfer.quantization.bits": [],
    "replace_with_kernel_inject": ["kernel_inject"],
    "enable_cuda_graph": [],
    "injection_policy": ["injection_dict"],
    "tensor_parallel.tp_size": [],
    "mp_size": [],
    "tensor_parallel.autotp_size": [],
    "moe.enabled": [],
    "moe.moe_experts": ["num_experts"],
    "moe.type": [],
    "moe.ep_size": [],
    "ep_size": [],
    "moe_experts": [],
    "moe_type": [],
    "ep_group": ["expert_group"],
    "ep_mp_group": ["expert_mp_group"],
    "moe.ep_group": ["expert_group"],
    "moe.ep_mp_group": ["expert_mp_group"],
    "zero_optimization.zero_hpz_partition_size": [],
    "zero_optimization.leaf_module.classes": [],
    "zero_optimization.leaf_module.names": [],
    "zero_optimization.leaf_module.name_suffixes": [],
    "tensor_parallel.mpu": [],
    "tensor_parallel.tp_group": [],
    "tensor_parallel.partition_config": [],
    "tensor_parallel.preset_model": [],
    "mpu": [],
    "training_mp_size": [],
    "save_mp_checkpoint_path": [],
}
IGNORED = {
    "use_triton": [],
    "triton_autotune": [],
    "injection_policy_tuple": [],
    "zero_optimization.stage3_max_reuse_distance": ["max_reuse_distance"],
    "zero_optimization.stage3_param_persistence_threshold": ["param_persistence_threshold"],
    "zero_optimization.stage3_model_persistence_threshold": ["model_persistence_threshold"],
    "aio.single_submit": [],
    "aio.overlap_events": [],
    "tensor_parallel.tp_grain_size": [],
    "tensor_parallel.enabled": [],
    "replace_method": [],
    "set_empty_params": [],
    "keep_module_on_host": [],
    "return_tuple": [],
    "transposed_mode": [],
    "triangular_masking": ["tm"],
    "config": ["args"],
    "zero_optimization.overlap_comm": [],
    "zero_optimization.contiguous_gradients": [],
    "zero_optimization.reduce_bucket_size": [],
    "zero_optimization.sub_group_size": [],
    "zero_optimization.offload_optimizer": [],
    "zero_optimization.round_robin_gradients": [],
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": [],
    "train_batch_size": [],
    "train_micro_batch_size_per_gpu": [],
    "steps_per_print": [],
    "wall_clock_breakdown": [],
    "optimizer": [],
    "scheduler": [],
    "gradient_accumulation_steps": [],
    "gradient_clipping": [],
    "gradient_predivide_factor": [],
}
EXPECTED = [
    *((path, Status.SUPPORTED, aliases) for path, aliases in (SECTIONS | SUPPORTED).items()),
    *((path, Status.IGNORED, aliases) for path, aliases in IGNORED.items()),
]


def _document(path: str, value: Any) -> Any:
    """A configuration of one key."""
    for name in reversed(path.split(".") if path else []):
        value = {name: value}
    return value


@pytest.mark.parametrize(("path", "status", "aliases"), EXPECTED, ids=[path for path, _, _ in EXPECTED])
def test_every_key_of_deepspeed_is_triaged(path: str, status: Status, aliases: list[str]) -> None:
    key = BY_PATH[path]
    assert key.status is status
    assert key.is_section == (path in BY_NAME)
    assert set(aliases) <= set(key.aliases)
    assert all(BY_NAME[key.parent][alias] is key for alias in aliases)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_rows_are_consistent(key: Key) -> None:
    assert key.reason
    assert BY_PATH[key.path] is key
    assert all(BY_NAME[key.parent][name] is key for name in (key.name, *key.aliases))
    if key.parent:
        assert BY_PATH[key.parent].is_section
    if key.same_as is not None:
        assert BY_PATH[key.same_as].status is key.status
    if key.status is Status.SUPPORTED and not key.is_section:
        assert key.parse is not None


@pytest.mark.parametrize("key", [key for key in KEYS if key.field], ids=lambda key: key.path)
def test_table_and_settings_agree_on_defaults(key: Key) -> None:
    assert key.field is not None
    assert reduce(getattr, key.field.split("."), Settings()) == key.default


@pytest.mark.parametrize("key", [key for key in KEYS if key.status is Status.IGNORED], ids=lambda key: key.path)
def test_a_key_without_effect_is_listed_whatever_it_holds(key: Key) -> None:
    settings = resolve_settings(_document(key.path, {"anything": [1, {"nested": True}]}))
    assert [(ignored.path, ignored.reason) for ignored in settings.without_effect] == [(key.path, key.reason)]


@pytest.mark.parametrize("key", [key for key in KEYS if key.aliases], ids=lambda key: key.path)
def test_an_alias_beside_its_key_is_refused(key: Key) -> None:
    for alias in key.aliases:
        both = _document(key.parent, {key.name: None, alias: None})
        prefix = f"{key.parent}." if key.parent else ""
        message = f"{prefix}{key.name} and {prefix}{alias} are the same key; keep one of them"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            resolve_settings(both)


@pytest.mark.parametrize("key", [key for key in KEYS if key.status is Status.SUPPORTED], ids=lambda key: key.path)
def test_a_letter_too_many_is_understood(key: Key) -> None:
    message = f"unknown key {key.path}x; did you mean {key.path}?"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        resolve_settings(_document(f"{key.path}x", 1))


WORDS = ["auto", "cpu", "nvme", "cuda", "none", "fp16", "24GB", "folder", "standard"]
WORDS += ["int8", "symmetric", "asymmetric", "int", "fp8", "clip"]
VALUES: list[Any] = [
    *("", None, True, False, torch.float16, 0, 1, 3, 8, 0.5, 1e9, -1),
    *([1], [], {}, {"enabled": False}, {"enabled": True, "num_bits": 8}, {"lr": [0.1]}),
    *(4, [True, 8], ["fc1"], {"fc1": {"num_bits": 4}}, {"fc1": {"group_size": 64}}, QuantizationConfig()),
    *WORDS,
]


def _is_usable(key: Key, value: Any) -> bool:
    """Whether a configuration of this key alone is accepted."""
    try:
        resolve_settings(_document(key.path, value))
    except ConfigError:
        return False
    return True


def _sections(path: str, values: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Random contents of a section, made of its known keys under any of their names."""
    contents = {
        key.path: _sections(key.path, values)
        if key.path in BY_NAME and key.status is Status.SUPPORTED
        else st.sampled_from(values[key.path]).map(deepcopy)
        for key in BY_NAME[path].values()
    }
    chosen = st.lists(st.sampled_from(sorted(BY_NAME[path])), max_size=6, unique=True)
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({name: contents[BY_NAME[path][name].path] for name in names})
    )


ANYTHING = _sections("", dict.fromkeys(BY_PATH, VALUES))
USABLE = st.deferred(
    lambda: _sections(
        "", {path: [value for value in VALUES if _is_usable(key, value)] for path, key in BY_PATH.items()}
    )
)


@hypothesis_settings(deadline=None)
@given(ANYTHING, ANYTHING)
def test_neither_mapping_is_changed_and_nothing_but_config_errors_leave(
    config: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    before = deepcopy((config, kwargs))
    with suppress(ConfigError):
        resolve_settings(config, kwargs)
    assert (config, kwargs) == before


@hypothesis_settings(deadline=None)
@given(USABLE)
def test_usable_keys_are_refused_together_only_where_they_contradict(config: dict[str, Any]) -> None:
    before = deepcopy(config)
    try:
        settings = resolve_settings(config)
    except ConfigError as refused:
        if not re.search("contradicts|are the same key|is more than", str(refused)):
            raise
    else:
        assert resolve_settings(kwargs=config) == settings
        assert resolve_settings(config, config) == settings
        assert len({settings, resolve_settings(deepcopy(config))}) == 1
    assert config == before


@pytest.mark.parametrize("moe", [True, False, {"enabled": True, "ep_size": 1, "moe_experts": [1], "type": "standard"}])
def test_a_mixture_on_one_gpu_needs_nothing(moe: object) -> None:
    settings = resolve_settings({"moe": moe})
    assert {ignored.path for ignored in settings.without_effect} <= {"moe.moe_experts"}
    assert settings.num_experts is None


@pytest.mark.parametrize(
    "config",
    [
        {"moe": {"ep_size": 4, "moe_experts": [8, 8], "enabled": 1, "type": "standard"}},
        {"moe": {"ep_size": "4", "num_experts": 8}},
        {"ep_size": 4, "moe_experts": [8], "moe_type": "standard"},
        {"moe": {"ep_size": 4}, "ep_size": 4, "moe_experts": 8, "zinfer": {"parallel": {"expert": 4}}},
    ],
)
def test_all_spellings_of_experts_mean_the_same(config: dict[str, Any]) -> None:
    settings = resolve_settings(config)
    assert (settings.parallel.expert, settings.num_experts, settings.without_effect) == (4, 8, ())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"moe": {"enabled": False, "ep_size": 2}},
            "moe.enabled = false (config) contradicts moe.ep_size = 2 (config)",
        ),
        ({"moe": {"ep_size": 2}, "ep_size": 4}, "ep_size = 4 (config) contradicts moe.ep_size = 2 (config): both mean"),
        ({"ep_size": 0}, "ep_size = 0: expected a whole number of at least 1"),
        ({"moe": {"moe_experts": [4, 8]}}, "moe.moe_experts = [4, 8]: expected one number, because all mixtures"),
        ({"moe": {"moe_experts": []}}, "moe.moe_experts = []: expected one number"),
        ({"moe": {"type": "dense"}}, 'moe.type = "dense": expected "standard"'),
    ],
)
def test_what_contradicts_itself_about_experts_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_settings(config)
    assert str(refused.value).startswith(said)
