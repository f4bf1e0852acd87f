"""Other systems for `zinfer bench --compare`, each run in a process of its own on a real random checkpoint."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from zinfer.errors import ConfigError

_LAYERS_AHEAD: Final = 3  # that ZeRO fetches: it is faster than what its inference example sets, a sixth of a layer
_WEIGHTS_SHARE: Final = 0.8  # of device memory: Accelerate's documentation advises to leave some for the KV cache


@dataclass(frozen=True)
class Task:
    """What a rival's process is asked to do.

    Attributes:
        rival: a key of `RIVALS`.
        checkpoint: a folder with safetensors.
        scratch: an empty folder of the rival's own.
        prompts: token ids; new_tokens are generated after each.
        batch_size: prompts that one call of `generate` takes, in each process.
        device: "cuda" or "cpu".
        device_bytes: memory of each device that the rival may take; None: all that is free.
        num_ranks: devices, and processes of a rival that starts one on each.
        result: the file that the figures are written to, as JSON.
    """

    rival: str
    checkpoint: str
    scratch: str
    prompts: list[list[int]]
    new_tokens: int
    batch_size: int
    device: str
    device_bytes: int | None
    num_ranks: int
    result: str


@dataclass(frozen=True)
class Rival:
    """Another system.

    Attributes:
        start: loads a checkpoint and returns a model with transformers' `generate`.
        has_ranks: whether it shares prompts among processes, one on each device; else one process uses all devices.
    """

    package: str
    start: Callable[[Task], Any]
    has_ranks: bool

    def num_processes(self, task: Task) -> int:
        """Return the processes that share the task's prompts."""
        return task.num_ranks if self.has_ranks else 1


def start_accelerate(task: Task) -> Any:
    """Load as Accelerate's guide to big models does: layers fill the device, then host memory, then the disk."""
    from transformers import AutoModelForCausalLM

    limits: dict[str, Any] = {"device_map": "auto", "offload_folder": task.scratch}
    if task.device == "cpu":
        limits = {"device_map": "cpu"}
    else:
        import psutil

        free = [torch.cuda.mem_get_info(number)[0] for number in range(task.num_ranks)]
        most = {number: int(_WEIGHTS_SHARE * (task.device_bytes or nbytes)) for number, nbytes in enumerate(free)}
        limits["max_memory"] = {**most, "cpu": psutil.virtual_memory().available * 9 // 10}
    return AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype="auto", **limits).eval()


def start_deepspeed(task: Task) -> Any:
    """Load with ZeRO stage 3 and parameters offloaded to host memory, by transformers' own integration.

    The environment states this rank as torchrun does.
    """
    os.environ["DS_ACCELERATOR"] = task.device  # else it takes a GPU where there is one
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    settings = _zero_settings(AutoConfig.from_pretrained(task.checkpoint), is_pinned=task.device == "cuda")
    deepspeed.init_distributed("nccl" if task.device == "cuda" else "gloo")
    partitioned = HfDeepSpeedConfig(settings)  # transformers keeps a weak reference: it must live while the model loads
    model = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype="auto")
    del partitioned
    return deepspeed.initialize(model=model, config=settings)[0].module.eval()


def _zero_settings(config: Any, *, is_pinned: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    with torch.device("meta"):
        num_values = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    ahead = _LAYERS_AHEAD * num_values // text.num_hidden_layers
    return {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": config.dtype == torch.float16},
        "bf16": {"enabled": config.dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": ahead,
            "stage3_max_live_parameters": ahead,
            "stage3_param_persistence_threshold": text.hidden_size,
            "offload_param": {"device": "cpu", "pin_memory": is_pinned},
        },
    }


RIVALS: Final[Mapping[str, Rival]] = {
    "accelerate": Rival("accelerate", start_accelerate, has_ranks=False),
    "deepspeed": Rival("deepspeed", start_deepspeed, has_ranks=True),
}


def chosen_rivals(names: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas.

    Raises:
        ConfigError: a name is not one of `RIVALS`.
    """
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in RIVALS:
            raise ConfigError(f"--compare: no rival is called {name!r}; known ones: {', '.join(RIVALS)}")
    return chosen


def is_installed(name: str) -> bool:
    """Whether the rival's package can be imported."""
    return find_spec(RIVALS[name].package) is not None
