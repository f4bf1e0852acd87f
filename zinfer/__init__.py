"""Runs models that do not fit in GPU memory: weights stream from disk and host memory while the layers compute."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from zinfer.compat import missing

if TYPE_CHECKING:
    from zinfer import accelerator as accelerator
    from zinfer import comm as comm
    from zinfer import errors as errors
    from zinfer import mii as mii
    from zinfer import ops as ops
    from zinfer import ray as ray
    from zinfer import runtime as runtime
    from zinfer.batching.async_llm import AsyncLLM
    from zinfer.batching.beam_search import BeamSearchParams
    from zinfer.batching.llm import LLM
    from zinfer.comm import init_distributed
    from zinfer.compat import zero as zero
    from zinfer.compat.accelerator import get_accelerator
    from zinfer.compat.inference import (
        DeepSpeedConfigError,
        DeepSpeedInferenceConfig,
        add_config_arguments,
        default_inference_config,
    )
    from zinfer.config.quantization_rules import QuantizationConfig, QuantizationType
    from zinfer.engine.engine import InferenceEngine
    from zinfer.engine.entry import init_inference, initialize
    from zinfer.model.build import OnDevice
    from zinfer.model.quantize import quantize_transformer
    from zinfer.planning.job_plan import Job
    from zinfer.requests.completion import Completion
    from zinfer.requests.sampling_params import SamplingParams
    from zinfer.requests.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "Completion",
    "DeepSpeedConfigError",
    "DeepSpeedInferenceConfig",
    "InferenceEngine",
    "Job",
    "OnDevice",
    "QuantizationConfig",
    "QuantizationType",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "add_config_arguments",
    "default_inference_config",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "quantize_transformer",
]

_HOMES: Final = {
    "LLM": "zinfer.batching.llm",
    "AsyncLLM": "zinfer.batching.async_llm",
    "BeamSearchParams": "zinfer.batching.beam_search",
    "Completion": "zinfer.requests.completion",
    "SamplingParams": "zinfer.requests.sampling_params",
    "StructuredOutputsParams": "zinfer.requests.structured_outputs",
    "InferenceEngine": "zinfer.engine.engine",
    "Job": "zinfer.planning.job_plan",
    "OnDevice": "zinfer.model.build",
    "init_distributed": "zinfer.comm",
    "init_inference": "zinfer.engine.entry",
    "initialize": "zinfer.engine.entry",
    "quantize_transformer": "zinfer.model.quantize",
    "QuantizationConfig": "zinfer.config.quantization_rules",
    "QuantizationType": "zinfer.config.quantization_rules",
    "DeepSpeedConfigError": "zinfer.compat.inference",
    "DeepSpeedInferenceConfig": "zinfer.compat.inference",
    "add_config_arguments": "zinfer.compat.inference",
    "default_inference_config": "zinfer.compat.inference",
    "get_accelerator": "zinfer.compat.accelerator",
}
_MODULES: Final = {
    "accelerator": "zinfer.accelerator",
    "comm": "zinfer.comm",
    "errors": "zinfer.errors",
    "mii": "zinfer.mii",
    "ops": "zinfer.ops",
    "ray": "zinfer.ray",
    "runtime": "zinfer.runtime",
    "zero": "zinfer.compat.zero",
}
"""Public modules, which need no import of their own, as in `deepspeed.comm.get_rank()`."""


# OpenMP's threads spin for a millisecond in each of torch's operators while they wait for each other, also for one that
# another session's or container's programs keep from running: small operators then take 40 times as long. On idle cores
# a thousand spins are as fast. torch reads this when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds, `zinfer --help` should not."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(missing.sentence_for(name) or f"module 'zinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))


sys.meta_path.append(missing.Finder())
