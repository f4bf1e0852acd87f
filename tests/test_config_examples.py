"""Configurations as they are found in the wild resolve to what they mean."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from zinfer.config import Aio, Memory, Offload, Streaming, resolve_settings

OPT_CPU: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 2 * 7168 * 7168,
        "stage3_param_persistence_threshold": 7168,
        "stage3_max_live_parameters": 2 * 7168 * 7168,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 7168 * 7168,
        "sub_group_size": 1e9,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "steps_per_print": 2000,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


NVME: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 1e9,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": False,
            "buffer_count": 8,
            "buffer_size": 0.9 * 12288**2,
            "max_in_cpu": 0,
        },
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 4, "single_submit": False, "overlap_events": True},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999]}},
    "gradient_accumulation_steps": 1,
}


INFERENCE: dict[str, Any] = {
    "dtype": "bf16",
    "tensor_parallel": {"tp_size": 1, "enabled": True},
    "replace_with_kernel_inject": False,
    "replace_method": "auto",
    "enable_cuda_graph": False,
    "moe": {"ep_size": 1, "moe_experts": [1], "type": "standard"},
    "quant": {"enabled": False, "weight": {"num_bits": 8}},
    "zero": {"stage": 3, "offload_param": {"device": "cpu"}},
    "max_tokens": 4096,
    "min_tokens": 16,
    "base_dir": "/models",
    "checkpoint": "opt-30b",
    "zinfer": {"max_device_memory": "24GB", "max_host_memory": "200GiB"},
}


def test_opt_offloaded_to_host_memory() -> None:
    settings = resolve_settings(OPT_CPU)
    assert settings.dtype is torch.float16
    assert settings.offload == Offload(device="cpu", pin_memory=True)
    assert settings.streaming == Streaming(prefetch_bucket_size=102760448, max_live_parameters=102760448)
    assert [ignored.path for ignored in settings.without_effect] == [
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.sub_group_size",
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "steps_per_print",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "wall_clock_breakdown",
    ]


def test_nvme_offload_with_aio() -> None:
    settings = resolve_settings(NVME)
    assert settings.dtype is torch.bfloat16
    assert settings.offload == Offload(
        device="nvme",
        nvme_path=Path("/local_nvme"),
        pin_memory=False,
        buffer_count=8,
        buffer_size=int(0.9 * 12288**2),
        max_in_cpu=0,
    )
    assert settings.aio == Aio(block_size=2**20, queue_depth=8, intra_op_parallelism=4)
    assert settings.streaming == Streaming(prefetch_bucket_size=0, max_live_parameters=10**9)
    assert [ignored.path for ignored in settings.without_effect] == [
        "aio.single_submit",
        "aio.overlap_events",
        "optimizer",
        "gradient_accumulation_steps",
        "zero_optimization.offload_param.nvme_path",
    ]


def test_init_inference_dict() -> None:
    settings = resolve_settings(INFERENCE, {"keep_module_on_host": True})
    assert settings.dtype is torch.bfloat16
    assert (settings.min_out_tokens, settings.max_out_tokens) == (16, 4096)
    assert settings.checkpoint == Path("/models/opt-30b")
    assert settings.offload.device == "cpu"
    assert settings.memory == Memory(max_device_memory=24 * 10**9, max_host_memory=200 * 2**30)
    ignored = [ignored.path for ignored in settings.without_effect]
    assert ignored == ["tensor_parallel.enabled", "replace_method", "moe.moe_experts", "keep_module_on_host"]


@pytest.mark.parametrize("config", [OPT_CPU, NVME, INFERENCE], ids=["opt", "nvme", "inference"])
def test_real_configurations_are_left_as_they_were(config: dict[str, Any]) -> None:
    before = deepcopy(config)
    resolve_settings(config)
    assert config == before
