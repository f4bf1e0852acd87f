"""The systems that run one saved checkpoint from host memory or from disk, each with the same three methods.

Each is set up as its documentation says. Weights outside the layers stay on the device, except with DeepSpeed: ZeRO
offloads every parameter above a threshold, so it also moves the embedding, and again as the head tied to it.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from homes import config_for
from random_model import drop_page_cache
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import zinfer

# Most elements fetched ahead of their use, in squares of the hidden size (an OPT layer has 12 of them).
EXAMPLE_AHEAD: Final = 2  # what DeepSpeed's ZeRO-Inference example sets
FAR_AHEAD: Final = 40  # three layers

Tier: TypeAlias = Literal["host", "disk"]


@dataclass(frozen=True)
class Running:
    """A model that is ready to generate.

    Attributes:
        generate: transformers' own arguments and result; inputs may lie on the CPU.
        away_bytes: bytes of the layers' weights that are not on the device now, where no pass is under way.
        before_pass: what has to be done, outside the time of a pass, for the pass to find its weights in their tier.
        close: gives everything back.
    """

    generate: Callable[..., torch.Tensor]
    away_bytes: Callable[[], int]
    before_pass: Callable[[], None]
    close: Callable[[], None]


@dataclass(frozen=True)
class System:
    """A way to run a checkpoint. ``package`` must be importable; ``start`` takes the checkpoint, an empty folder of the
    system's own, and the device; ``most_rows`` are the prompts of a job that it takes at once, None all of them;
    ``is_half`` says that it computes in half precision whatever the checkpoint."""

    name: str
    package: str
    tier: Tier
    start: Callable[[Path, Path, torch.device], Running]
    most_rows: int | None = None
    is_half: bool = False


def start_zinfer(folder: Path, scratch: Path, device: torch.device, tier: Tier) -> Running:
    """An engine that keeps all layers in one tier; it writes nothing and finds the device by itself."""
    engine = zinfer.init_inference(folder, config_for(folder, tier))

    def away_bytes() -> int:
        stats = engine.stats()
        return stats.streamed_bytes_per_pass if tier == "host" else stats.disk_bytes_per_pass

    return Running(engine.generate, away_bytes, _nothing, engine.destroy)


def start_accelerate(folder: Path, scratch: Path, device: torch.device, tier: Tier) -> Running:
    """`cpu_offload` or `disk_offload` for each layer; the rest on the device.

    The files that `disk_offload` writes are read through the page cache, which would hold them after one pass wherever
    the host's memory is larger than the model; so they are taken off it before each pass.
    """
    import accelerate

    model = OPTForCausalLM.from_pretrained(folder, dtype="auto").eval()
    decoder = model.model.decoder
    layers, decoder.layers = decoder.layers, nn.ModuleList()
    model.to(device)
    decoder.layers = layers
    for index, layer in enumerate(layers):
        if tier == "host":
            accelerate.cpu_offload(layer, execution_device=device)
        else:
            accelerate.disk_offload(layer, str(scratch / str(index)), execution_device=device)

    def away_bytes() -> int:
        return sum(p.numel() * p.element_size() for p in layers.parameters() if p.device.type == "meta")

    def before_pass() -> None:
        for written in scratch.iterdir():
            drop_page_cache(written)

    return Running(_generate(model, device), away_bytes, before_pass if tier == "disk" else _nothing, _nothing)


def start_deepspeed(folder: Path, scratch: Path, device: torch.device, tier: Tier, ahead: int) -> Running:
    """ZeRO stage 3 with parameters offloaded, loaded by transformers' own integration.

    Args:
        ahead: most elements that are fetched ahead of their use, in squares of the hidden size.
    """
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from transformers.integrations import HfDeepSpeedConfig

    config = OPTConfig.from_pretrained(folder)
    settings = _zero_settings(config, scratch if tier == "disk" else None, device, ahead)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    partitioned = HfDeepSpeedConfig(settings)  # transformers keeps a weak reference: it must live while the model loads
    model = OPTForCausalLM.from_pretrained(folder, dtype="auto")
    del partitioned
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    layers = engine.module.model.decoder.layers

    def away_bytes() -> int:
        return sum(_zero_away_bytes(p, tier) for p in layers.parameters())

    return Running(_generate(engine.module, device), away_bytes, _nothing, engine.destroy)


def _zero_settings(config: OPTConfig, nvme_path: Path | None, device: torch.device, ahead: int) -> dict[str, object]:
    """The settings of DeepSpeed's own ZeRO-Inference example, but pinned, and with a deeper queue for the disk."""
    square, pin = config.hidden_size**2, device.type == "cuda"
    offload: dict[str, object] = {"device": "cpu", "pin_memory": pin}
    if nvme_path is not None:
        largest = max(config.vocab_size * config.hidden_size, 9 * square)  # a buffer has to hold the largest parameter
        offload = {"device": "nvme", "nvme_path": str(nvme_path), "pin_memory": pin}
        offload |= {"buffer_count": 8, "buffer_size": largest}
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": config.dtype == torch.float16},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": ahead * square,
            "stage3_max_live_parameters": ahead * square,
            "stage3_param_persistence_threshold": config.hidden_size,
            "offload_param": offload,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 8 if pin else 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _zero_away_bytes(parameter: Any, tier: Tier) -> int:
    """Bytes of a partitioned parameter that is not gathered and whose home is the tier that was asked for."""
    away = parameter.ds_status.name == "NOT_AVAILABLE"
    on_disk = parameter.ds_tensor.final_location is not None and parameter.ds_tensor.final_location.name == "nvme"
    at_home = on_disk if tier == "disk" else parameter.ds_tensor.device.type == "cpu"
    return int(parameter.ds_numel * parameter.element_size()) if away and at_home else 0


def _generate(model: Any, device: torch.device) -> Callable[..., torch.Tensor]:
    @torch.no_grad()
    def generate(**options: Any) -> Any:
        moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in options.items()}
        return model.generate(**moved)

    return generate


def _nothing() -> None:
    pass


SYSTEMS: Final = (
    System("zinfer-host", "zinfer", "host", partial(start_zinfer, tier="host")),
    System("accelerate-host", "accelerate", "host", partial(start_accelerate, tier="host")),
    System("deepspeed-cpu", "deepspeed", "host", partial(start_deepspeed, tier="host", ahead=EXAMPLE_AHEAD)),
    System("deepspeed-cpu-ahead", "deepspeed", "host", partial(start_deepspeed, tier="host", ahead=FAR_AHEAD)),
    System("zinfer-disk", "zinfer", "disk", partial(start_zinfer, tier="disk")),
    System("accelerate-disk", "accelerate", "disk", partial(start_accelerate, tier="disk")),
    System("deepspeed-nvme", "deepspeed", "disk", partial(start_deepspeed, tier="disk", ahead=EXAMPLE_AHEAD)),
)


def chosen_systems(names: Iterable[str], systems: Sequence[System] = SYSTEMS) -> list[System]:
    """zinfer's own systems, and those with a given name or with one that goes on after it and a dash.

    Raises:
        ValueError: a name fits none.
    """
    chosen = {system.name for system in systems if system.package == "zinfer"}
    for name in names:
        found = {system.name for system in systems if f"{system.name}-".startswith(f"{name}-")}
        if not found:
            known = ", ".join(system.name for system in systems)
            raise ValueError(f"--peers: no system is called {name!r}; known ones: {known}")
        chosen |= found
    return [system for system in systems if system.name in chosen]
