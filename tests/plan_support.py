"""Shared by tests of plans: five large families by their published shapes, small outlines, invented machines."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig

from zinfer.model.known_models import KNOWN_MODELS, known_config
from zinfer.model.outline import Outline, read_outline
from zinfer.planning import job_search, size_search
from zinfer.planning.presets import Machine
from zinfer.probe.limits import MachineLimits
from zinfer.probe.rates import Rates


def known(name: str) -> dict[str, Any]:
    return dict(known_config(KNOWN_MODELS[name]))


LLAMA = known("llama-3-70b")
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3-70B": LLAMA,
    "Llama-3.1-405B": known("llama-3.1-405b"),
    "OPT-175B": known("opt-175b"),
    "BLOOM-176B": {
        "model_type": "bloom",
        "hidden_size": 14336,
        "n_layer": 70,
        "n_head": 112,
        "vocab_size": 250880,
        "torch_dtype": "bfloat16",
    },
    "Mixtral-8x22B": known("mixtral-8x22b"),
}
QUANTIZED_ELSEWHERE: dict[str, dict[str, Any]] = {
    "FP8 embeddings": {
        **DeepseekV3Config().to_dict(),
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_convert": ["embed_tokens"],
        },
    },
    "gpt-oss-120b by Quark": {
        **GptOssConfig().to_dict(),
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "quark", "quant_mode": "eager_mode"},
    },
}
"""Configurations as their publishers wrote them, of weights that a run refuses."""
NUM_PARAMS = {
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "OPT-175B": 174_604_468_224,
    "BLOOM-176B": 176_247_271_424,
    "Mixtral-8x22B": 140_630_071_296,
}
SMALL_LLAMA = {
    **LLAMA,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
GPU = torch.device("cuda", 0)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def outline_of(folder: Path) -> Outline:
    """The outline of a folder whose config does not change any more."""
    return read_outline(folder)


def rates(**changed: float) -> Rates:
    """Round figures: link 10, disk 2, host copies 5, device memory 1,000 GB/s, 100 TFLOP/s."""
    figures = {
        "link_bytes_per_s": 10e9,
        "disk_bytes_per_s": 2e9,
        "host_bytes_per_s": 5e9,
        "device_bytes_per_s": 1e12,
        "flops_per_s": 100e12,
    }
    return Rates(**(figures | changed), origin="made up")


def machine_with(device_bytes: int, host_bytes: int, speeds: Rates | None = None) -> Machine:
    """A GPU machine whose memory is all there for zinfer."""
    limits = MachineLimits(GPU, device_bytes, host_bytes, host_bytes)
    return Machine("made up", limits, device_bytes, speeds or rates())


def search_less(patch: pytest.MonkeyPatch) -> None:
    """Let plans of jobs be searched among fewer sizes with fewer rows, where a test is not about how fast they are."""
    for name, number in (
        *(("_FEW_STEPS", 1_000), ("_SAMPLE_STEPS", 3_000), ("_ROUGH_SAMPLE_STEPS", 2_000)),
        *(("_FINAL_STEPS", 8_000), ("_NUM_FINAL", 2)),
    ):
        patch.setattr(job_search, name, number)
    for module in (job_search, size_search):  # no job is long
        patch.setattr(module, "LONG_S", math.inf)
    for name, points in (
        *(("_NUM_SPREAD", 12), ("_NUM_ROUGHLY_SPREAD", 10), ("_NUM_SIMULATED", 4)),
        *(("_NUM_ROUGH", 4), ("_NUM_FINE", 8), ("_NUM_HALVINGS", 3)),
    ):
        patch.setattr(size_search, name, points)
