"""From a configuration to settings: the four patterns of `init_inference`, and what keys may say together."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zinfer.config.listing import CheckpointListing
from zinfer.config.quantization import resolve_quantization
from zinfer.config.reading import Given, Reading, merge, read
from zinfer.config.settings import Aio, Batch, Batching, Ignored, Memory, Offload, Settings, Streaming
from zinfer.config.source import config_source, kwargs_source
from zinfer.errors import ConfigError

STAGE = "zero_optimization.stage"
OFFLOAD_DEVICE = "zero_optimization.offload_param.device"
PIN_MEMORY = "zero_optimization.offload_param.pin_memory"
KV_TIER = "zinfer.kv_cache_tier"
NVME_PATH = "zero_optimization.offload_param.nvme_path"


def resolve_settings(
    config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    is_module: bool = False,
    swaps: bool = False,
) -> Settings:
    """The settings that `init_inference(model, config, **kwargs)` states. Neither mapping is changed.

    `config` is a dict, or the path of a JSON file, of DeepSpeed's inference keys, of its training-style sections
    (`zero_optimization`, `aio`, `fp16` ...) or of both; zinfer's own keys are under "zinfer", and may stand alone among
    `kwargs`. "auto" and None mean the default. A key in both must have one meaning. What every key becomes is in
    `zinfer.config.keys.KEYS`; those given without effect are listed in the result.

    `is_module` tells that the model is a module, whose weights are in memory unless a checkpoint is named; `swaps` that
    an `LLM` runs it, which may keep sequences under `nvme_path` that had to make room.

    Raises:
        ConfigError: an unreadable file, an unknown key, an unusable value, a feature that is not available yet, or
            keys that contradict each other. The message names the key's full path and the remedy.
    """
    reading = merge(read(config_source(config)), read(kwargs_source(kwargs)))
    given = reading.given
    _check_offload(given)
    _check_lengths(given)
    _check_batch(given)
    _check_tier(given)
    fields: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for item in given.values():
        if item.key.field is not None:
            section, _, name = item.key.field.rpartition(".")
            fields[section][name] = item.value
    quantization, idle = resolve_quantization(given)
    writes = quantization is not None or (is_module and "checkpoint" not in given)
    fields[""] |= {
        "dtype": _dtype(given),
        "checkpoint": _checkpoint(given),
        "quantization": quantization,
        "without_effect": _without_effect(reading) + idle + (() if swaps else _idle_nvme_path(given, writes=writes)),
    }
    return Settings(
        **fields[""],
        offload=Offload(**fields["offload"]),
        aio=Aio(**fields["aio"]),
        streaming=Streaming(**fields["streaming"]),
        memory=Memory(**fields["memory"]),
        batch=Batch(**fields["batch"]),
        batching=Batching(**fields["batching"]),
    )


def _check_offload(given: Mapping[str, Given]) -> None:
    stage, device = given.get(STAGE), given.get(OFFLOAD_DEVICE)
    if stage is not None and device is not None and device.value != "none" and stage.value != 3:
        raise ConfigError(
            f"{stage} contradicts {device}: parameters are offloaded at stage 3 only; "
            f'set {stage.written} to 3, or {device.written} to "none"'
        )


def _check_lengths(given: Mapping[str, Given]) -> None:
    least, most = given.get("min_out_tokens"), given.get("max_out_tokens")
    if least is not None and most is not None and least.value > most.value:
        raise ConfigError(f"{least} is more than {most}; lower the one or raise the other")


def _check_batch(given: Mapping[str, Given]) -> None:
    names = [f"zinfer.{name}" for name in ("batch_size", "prompt_len", "new_tokens")]
    missing = [name for name in names if name not in given]
    if missing and len(missing) < len(names):
        raise ConfigError(f"{' and '.join(missing)}: missing; a batch has {', '.join(names)}, give all of them or none")


def _check_tier(given: Mapping[str, Given]) -> None:
    tier, pins = given.get(KV_TIER), given.get(PIN_MEMORY)
    if tier is not None and tier.value == "host" and pins is not None and not pins.value:
        raise ConfigError(
            f"{tier} contradicts {pins}: keys and values come and go beside the compute from pinned memory only; "
            f'remove {pins.written}, or set {tier.written} to "device"'
        )


def _dtype(given: Mapping[str, Given]) -> torch.dtype | None:
    """The one dtype that `dtype`, `fp16.enabled` and `bf16.enabled` agree on; int8 speaks of stored weights only."""
    stated: list[tuple[Given, torch.dtype]] = []
    if "dtype" in given and given["dtype"].value.is_floating_point:
        stated.append((given["dtype"], given["dtype"].value))
    for path, dtype in (("fp16.enabled", torch.float16), ("bf16.enabled", torch.bfloat16)):
        if path in given and given[path].value:
            stated.append((given[path], dtype))
    for (first, ours), (second, theirs) in pairwise(stated):
        if ours != theirs:
            raise ConfigError(
                f"{first} ({first.source.label}) contradicts {second} ({second.source.label}): "
                "weights have one dtype; keep one of them"
            )
    return stated[0][1] if stated else None


def _checkpoint(given: Mapping[str, Given]) -> Path | CheckpointListing | None:
    if "checkpoint" not in given:
        return None
    checkpoint: Path | CheckpointListing = given["checkpoint"].value
    if "base_dir" not in given:
        return checkpoint
    base_dir: Path = given["base_dir"].value
    if isinstance(checkpoint, CheckpointListing):
        return replace(checkpoint, base_dir=checkpoint.base_dir or base_dir)
    return base_dir / checkpoint


def _without_effect(reading: Reading) -> tuple[Ignored, ...]:
    ignored = [Ignored(path, given.reason) for path, given in reading.ignored.items()]
    if "base_dir" in reading.given and "checkpoint" not in reading.given:
        ignored.append(Ignored("base_dir", "a checkpoint is joined to it, and the configuration names none"))
    return tuple(ignored)


def _idle_nvme_path(given: Mapping[str, Given], *, writes: bool) -> tuple[Ignored, ...]:
    """`nvme_path` where no weights are written there, as far as the configuration alone can tell."""
    if NVME_PATH not in given:
        return ()
    beside = "only zinfer.LLM swaps preempted sequences there"
    if OFFLOAD_DEVICE not in given or given[OFFLOAD_DEVICE].value != "nvme":
        return (Ignored(NVME_PATH, f'no weights are written there unless {OFFLOAD_DEVICE} is "nvme"; {beside}'),)
    if not writes:
        reason = "the checkpoint's files are read where they lie; only weights that other tools quantized are written"
        return (Ignored(NVME_PATH, f"{reason} there, in the form that streams; {beside}"),)
    return ()
