"""Other systems for `zinfer bench --compare`, each run in a process of its own on a real random checkpoint."""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from zinfer.errors import ConfigError

_LAYERS_AHEAD: Final = 3  # that ZeRO fetches: it is faster than what its inference example sets, a sixth of a layer


@dataclass(frozen=True)
class Task:
    """What a rival's process is asked to do.

    Attributes:
        rival: a key of `RIVALS`.
        checkpoint: a folder with safetensors.
        scratch: an empty folder of the rival's own.
        prompts: token ids; new_tokens are generated after each.
        batch_size: prompts that one call of `generate` takes.
        device: "cuda" or "cpu".
        device_bytes: memory of the device that weights may take; None: all that is free.
        result: the file that the seconds are written to, as JSON.
    """

    rival: str
    checkpoint: str
    scratch: str
    prompts: list[list[int]]
    new_tokens: int
    batch_size: int
    device: str
    device_bytes: int | None
    result: str


@dataclass(frozen=True)
class Rival:
    """Another system. ``start`` loads a checkpoint and returns a model with transformers' `generate`."""

    package: str
    start: Callable[[Task], Any]


def start_accelerate(task: Task) -> Any:
    """Load as Accelerate's guide to big models does: layers fill the device, then host memory, then the disk."""
    from transformers import AutoModelForCausalLM

    limits: dict[str, Any] = {"device_map": "auto", "offload_folder": task.scratch}
    if task.device == "cpu":
        limits = {"device_map": "cpu"}
    elif task.device_bytes is not None:
        import psutil

        # A fifth of the cap is for activations and the KV cache, as Accelerate's documentation advises to leave some.
        limits["max_memory"] = {0: task.device_bytes * 4 // 5, "cpu": psutil.virtual_memory().available * 9 // 10}
    return AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype="auto", **limits).eval()


def start_deepspeed(task: Task) -> Any:
    """Load with ZeRO stage 3 and parameters offloaded to host memory, by transformers' own integration."""
    os.environ["DS_ACCELERATOR"] = task.device  # else it takes a GPU where there is one
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = AutoConfig.from_pretrained(task.checkpoint)
    settings = _zero_settings(config, is_pinned=task.device == "cuda")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
        "train_batch_size": 1,
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
    "accelerate": Rival("accelerate", start_accelerate),
    "deepspeed": Rival("deepspeed", start_deepspeed),
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
