"""Resolving whole configurations: where keys may stand, aliases, contradictions, what is not available."""

from pathlib import Path
from typing import Any

import pytest
import torch

from zinfer.config import Aio, Memory, Offload, Settings, resolve_settings
from zinfer.config.listing import CheckpointListing
from zinfer.errors import ConfigError


def _refusal(config: dict[str, Any] | None = None, /, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve_settings(config, kwargs)
    assert isinstance(refused.value, ValueError)
    return str(refused.value)


def test_nothing_gives_the_defaults() -> None:
    assert resolve_settings() == resolve_settings(None, {}) == resolve_settings({}) == Settings()


def test_config_kwargs_and_both_say_the_same() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    expected = Settings(dtype=torch.float16, offload=Offload(device="cpu"))
    assert resolve_settings({"dtype": "fp16", "zero": zero}) == expected
    assert resolve_settings(kwargs={"dtype": torch.half, "zero": zero}) == expected
    assert (
        resolve_settings({"dtype": "half", "zero_optimization": zero}, {"dtype": torch.half, "zero": zero}) == expected
    )
    halves = resolve_settings({"zero": {"stage": 3}}, {"dtype": "fp16", "zero": {"offload_param": {"device": "cpu"}}})
    assert halves == expected


def test_auto_and_none_leave_the_word_to_the_other_source() -> None:
    for silent in ("auto", None):
        assert resolve_settings({"max_out_tokens": silent}, {"max_out_tokens": 7}).max_out_tokens == 7
        assert resolve_settings({"max_out_tokens": 7}, {"max_tokens": silent}).max_out_tokens == 7
        assert resolve_settings({"zero": silent, "aio": {"block_size": silent}}) == Settings()


def test_a_key_given_twice_with_different_values() -> None:
    assert _refusal({"dtype": "fp16"}, dtype=torch.float32) == (
        'dtype is given twice with different values: dtype = "fp16" (config) '
        "and dtype = torch.float32 (keyword arguments); keep one of them"
    )
    assert _refusal({"zero": {"stage": 3}}, zero_optimization={"stage": 0}) == (
        "zero_optimization.stage is given twice with different values: zero.stage = 3 (config) "
        "and zero_optimization.stage = 0 (keyword arguments); keep one of them"
    )
    assert "train_batch_size = 1 (config) and train_batch_size = 2 (key" in _refusal(
        {"train_batch_size": 1}, train_batch_size=2
    )


def test_own_keys_may_stand_alone_as_keyword_arguments_only() -> None:
    own = {"max_device_memory": "24GB", "num_slots": 3, "synchronous": True, "device": "cpu"}
    expected = Settings(num_slots=3, synchronous=True, device="cpu", memory=Memory(max_device_memory=24 * 10**9))
    assert resolve_settings({"zinfer": own}) == expected
    assert resolve_settings(kwargs=own) == expected
    assert resolve_settings(kwargs={"zinfer": own}) == expected
    assert resolve_settings({"zinfer": own}, own) == expected
    assert _refusal(zinfer=own, num_slots=3) == "zinfer.num_slots and num_slots are the same key; keep one of them"
    assert _refusal({"num_slots": 3}) == "unknown key num_slots; it belongs in zinfer.num_slots"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "unknown key zero_optimization.offload_param.devise; did you mean zero_optimization.offload_param.device?",
        ),
        ({"zero": {"offload_parm": {}}}, "unknown key zero.offload_parm; did you mean zero.offload_param?"),
        ({"dtpye": "fp16"}, "unknown key dtpye; did you mean dtype?"),
        ({"enable-cuda-graphs": True}, "unknown key enable-cuda-graphs; did you mean enable_cuda_graph?"),
        ({"stage": 3}, "unknown key stage; it belongs in zero_optimization.stage"),
        (
            {"aio": {"nvme_path": "/x"}},
            "unknown key aio.nvme_path; it belongs in zero_optimization.offload_param.nvme_path",
        ),
        ({"offload_params": {}}, "unknown key offload_params; did you mean zero_optimization.offload_param?"),
        ({"quant": {"enabeld": False}}, "unknown key quant.enabeld; did you mean quant.enabled?"),
        ({"zinfer": {"max_gpu_mem": 1}}, "unknown key zinfer.max_gpu_mem; "),
        ({"xyzzy": 1}, "unknown key xyzzy; remove it; zinfer.config.keys.KEYS lists what is known"),
        (
            {"checkpoint_config": {"qqq": 1}},
            "unknown key checkpoint_config.qqq; known there: base_dir, checkpoint_dir, ",
        ),
        ({"aio": {3: 1}}, "aio.3: keys must be text"),
    ],
)
def test_unknown_keys_name_their_path_and_what_was_meant(config: dict[str, Any], message: str) -> None:
    assert _refusal(config).startswith(message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}},
            'zero_optimization.stage = 2 contradicts zero_optimization.offload_param.device = "nvme": parameters are '
            "offloaded at stage 3 only; set zero_optimization.stage to 3, or zero_optimization.offload_param.device "
            'to "none"',
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled = true (config) contradicts bf16.ena"),
        (
            {"dtype": "fp32", "bf16": {"enabled": True}},
            'dtype = "fp32" (config) contradicts bf16.enabled = true (config)',
        ),
        (
            {"aio": {"thread_count": 4, "intra_op_parallelism": 8}},
            "aio.thread_count = 4 (config) contradicts aio.intra_op_parallelism = 8 (config): ",
        ),
        (
            {"checkpoint": "a", "checkpoint_config": {"checkpoint_dir": "b"}},
            'checkpoint_config.checkpoint_dir = "b" (config) contradicts checkpoint = "a" (config): ',
        ),
        (
            {"zero": {"cpu_offload_param": True, "offload_param": {"device": "nvme"}}},
            "zero.cpu_offload_param = true (config) contradicts zero.offload_param.device = ",
        ),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9 is more than max_tokens = 8; "),
    ],
)
def test_contradictions_name_both_sides(config: dict[str, Any], message: str) -> None:
    assert _refusal(config).startswith(message)


def test_agreeing_spellings_are_fine() -> None:
    assert resolve_settings({"aio": {"thread_count": 4, "intra_op_parallelism": 4}}).aio == Aio(intra_op_parallelism=4)
    assert (
        resolve_settings({"dtype": "half", "fp16": {"enabled": True}, "bf16": {"enabled": False}}).dtype is torch.half
    )
    assert resolve_settings({"zero": {"stage": 3, "cpu_offload_param": True}}).offload == Offload(device="cpu")
    assert resolve_settings({"zero": {"stage": 0, "offload_param": {"device": "none"}}}).offload.device == "none"
    for stage in range(4):
        assert resolve_settings({"zero": {"stage": stage}}) == Settings()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"moe": {"type": "residual"}}, 'moe.type = "residual" is not available yet: residual mixtures add'),
        ({"moe_type": "residual"}, 'moe_type = "residual" is not available yet: '),
        (
            {"checkpoint": {"type": "Megatron", "checkpoints": ["mp_rank_00/a.pt", "mp_rank_01/a.pt"], "version": 0.0}},
            'checkpoint = {"type": "Megatron", ',
        ),
        (
            {"checkpoint": {"type": "BLOOM", "checkpoints": {"tp": ["a.pt"], "non_tp": ["b.pt"]}}},
            'checkpoint = {"type": "BLOOM", ',
        ),
        (
            {"checkpoint": {"type": "ds_model", "checkpoints": ["a"], "mp_size": 2}},
            'checkpoint = {"type": "ds_model", "checkpoints": ["a"], "mp_size": 2} is not available yet: weights that',
        ),
    ],
)
def test_what_is_not_available_yet_is_refused(kwargs: dict[str, Any], message: str) -> None:
    refusal = _refusal(**kwargs)
    assert refusal.startswith(message)
    assert "; remove it or set it to " in refusal


def test_a_refused_feature_says_which_value_is_fine() -> None:
    assert _refusal(moe_type="residual").endswith('; remove it or set it to "standard"')


def test_checkpoint_is_joined_to_its_folder() -> None:
    assert resolve_settings({"checkpoint": "a", "base_dir": ""}).checkpoint == Path("a")
    assert resolve_settings({"checkpoint": "a"}, {"base_dir": Path("/m")}).checkpoint == Path("/m/a")
    assert resolve_settings({"ckpt_config": {"checkpoint_dir": "a", "base_dir": "/m"}}).checkpoint == Path("/m/a")
    alone = resolve_settings({"base_dir": "/m"})
    assert alone.checkpoint is None
    assert [ignored.path for ignored in alone.without_effect] == ["base_dir"]
    listed = {"type": "ds_model", "checkpoints": ["a.safetensors"], "version": 1.0}
    for base_dir, found in (({"base_dir": "/m"}, "/m/a.safetensors"), ({}, "a.safetensors")):
        checkpoint = resolve_settings({"checkpoint": listed}, base_dir).checkpoint
        assert isinstance(checkpoint, CheckpointListing)
        assert checkpoint.paths == (Path(found),)
    inside = resolve_settings({"checkpoint": listed | {"base_dir": "/n"}}, {"base_dir": "/m"}).checkpoint
    assert isinstance(inside, CheckpointListing)
    assert inside.paths == (Path("/n/a.safetensors"),), "the list's own base_dir goes first"
    training = resolve_settings({"checkpoint": {"tag_validation": "Warn", "load_universal": False}})
    assert training.checkpoint is None
    assert [ignored.path for ignored in training.without_effect] == ["checkpoint"]
