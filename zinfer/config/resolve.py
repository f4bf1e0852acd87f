"""Resolve a configuration to settings, for all forms of `init_inference`, and check combinations of keys."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zinfer.config.listing import CheckpointListing
from zinfer.config.quantization import resolve_quantization
from zinfer.config.reading import Given, contradiction, merge, read
from zinfer.config.settings import Ignored, Settings
from zinfer.config.source import config_keys
from zinfer.config.values import dtype as parse_dtype
from zinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

STAGE = "zero_optimization.stage"
OFFLOAD_DEVICE = "zero_optimization.offload_param.device"
PIN_MEMORY = "zero_optimization.offload_param.pin_memory"
KV_TIER = "zinfer.kv_cache_tier"
OPTIMIZE = "zinfer.optimize"
GROUPS = {"tensor": "tensor_parallel.tp_group", "expert": "moe.ep_group"}
"""The keys that name the ranks of a mode."""
NVME_PATH = "zero_optimization.offload_param.nvme_path"

_DEFAULTS = Settings()


def resolve_settings(
    config: str | os.PathLike[str] | Mapping[str, object] | Settings | None = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    is_module: bool = False,
    swaps: bool = False,
    is_job: bool = False,
    options: Mapping[str, str] | None = None,
) -> Settings:
    """Resolve the arguments of `init_inference(model, config, **kwargs)`. Does not change the mappings.

    "auto" and None mean the default. A key given in both mappings must have the same value. `zinfer.config.keys.KEYS`
    documents every key; the result lists the given keys that have no effect.

    Args:
        config: a dict or the path of a JSON file, with DeepSpeed's inference keys, its training-style sections
            (`zero_optimization`, `aio`, `fp16` ...) or both. zinfer's own keys are under "zinfer". Settings are
            returned as they are, and go with no kwargs.
        kwargs: the same keys; zinfer's own need no section here.
        is_module: the model is a module, whose weights are in memory unless a checkpoint is given.
        swaps: an `LLM` runs the model, which may swap preempted sequences to `nvme_path`.
        is_job: the sizes are planned for a job's rows.
        options: the command's options that state keys of kwargs, by key, such as {"kv_cache_dtype": "--kv-cache"}.
            Messages name them instead of "keyword arguments".

    Raises:
        ConfigError: an unreadable file, an unknown key, an invalid value, a feature that is not available yet, or
            contradicting keys. The message names the key's full path and the remedy.
    """
    if isinstance(config, Settings):
        assert not kwargs, "settings are resolved already"
        return config
    in_file = isinstance(config, str | os.PathLike)
    stated, names = read(kwargs or {}, "keyword arguments", is_kwargs=True), options or {}
    everything = merge(
        read(config_keys(config), f"{config}" if in_file else "config", in_file=in_file),
        {path: replace(item, label=names.get(item.written.split(".")[0], item.label)) for path, item in stated.items()},
    )
    given = {path: item for path, item in everything.items() if not item.reason}
    _check_together(given)
    quantization, idle = resolve_quantization(given)
    parallel = _ranks_that_divide(given)
    writes = quantization is not None or (is_module and "checkpoint" not in given)
    ignored = [Ignored(path, item.reason) for path, item in everything.items() if item.reason]
    if "base_dir" in given and "checkpoint" not in given:
        ignored.append(Ignored("base_dir", "a checkpoint is joined to it, and the configuration names none"))
    ignored += idle
    if not swaps and NVME_PATH in given and (reason := _idle_nvme_path(given, writes=writes)):
        ignored.append(Ignored(NVME_PATH, f"{reason}; only zinfer.LLM swaps preempted sequences there"))
    if not is_job and OPTIMIZE in given and given[OPTIMIZE].value == "speed":
        ignored.append(Ignored(OPTIMIZE, 'only jobs are planned; set zinfer.kv_cache_dtype to "int8" or "fp8"'))
    fields: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for item in given.values():
        if item.key.field is not None:
            section, _, name = item.key.field.rpartition(".")
            fields[section][name] = item.value
    own = fields.pop("", {}) | {"dtype": _dtype(given), "checkpoint": _checkpoint(given)}
    fields["parallel"] |= parallel
    sections = {name: replace(getattr(_DEFAULTS, name), **stated) for name, stated in fields.items()}
    return Settings(**own, **sections, quantization=quantization, without_effect=tuple(ignored))


def _check_together(given: Mapping[str, Given]) -> None:
    stage, device = given.get(STAGE), given.get(OFFLOAD_DEVICE)
    if stage is not None and device is not None and device.value != "none" and stage.value != 3:
        raise ConfigError(
            f"{stage} contradicts {device}: parameters are offloaded at stage 3 only; "
            f'set {stage.written} to 3, or {device.written} to "none"'
        )
    mixes, experts = given.get("moe.enabled"), given.get("zinfer.parallel.expert")
    if mixes is not None and not mixes.value and experts is not None and experts.value > 1:
        raise contradiction(mixes, experts, f"remove {mixes.written}, or set {experts.written} to 1")
    least, most = given.get("min_out_tokens"), given.get("max_out_tokens")
    if least is not None and most is not None and least.value > most.value:
        raise ConfigError(f"{least} is more than {most}; lower the one or raise the other")
    names = [f"zinfer.{name}" for name in ("batch_size", "prompt_len", "new_tokens")]
    missing = [name for name in names if name not in given]
    if missing and len(missing) < len(names):
        raise ConfigError(f"{' and '.join(missing)}: missing; a batch has {', '.join(names)}, give all of them or none")
    tier, pins = given.get(KV_TIER), given.get(PIN_MEMORY)
    if tier is not None and tier.value == "host" and pins is not None and not pins.value:
        raise ConfigError(
            f"{tier} contradicts {pins}: copies of the KV cache overlap with compute only from pinned memory; "
            f'remove {pins.written}, or set {tier.written} to "device"'
        )


def _ranks_that_divide(given: Mapping[str, Given]) -> dict[str, int]:
    """Return the numbers of ranks in stated groups of them, by mode."""
    found = {}
    for mode, key in GROUPS.items():
        group, size = given.get(key), given.get(f"zinfer.parallel.{mode}")
        if group is None:
            continue
        found[mode] = len(group.value.ranks)
        if size is not None and size.value != found[mode]:
            raise contradiction(size, group, f"the group has {found[mode]} ranks; keep one of the two keys")
    return found


def _dtype(given: Mapping[str, Given]) -> torch.dtype | None:
    """Return the dtype that `dtype`, `fp16.enabled` and `bf16.enabled` agree on; ignores int8, for stored weights."""
    stated: list[tuple[Given, torch.dtype]] = []
    if "dtype" in given and given["dtype"].value.is_floating_point:
        stated.append((given["dtype"], given["dtype"].value))
    for path, name in (("fp16.enabled", "fp16"), ("bf16.enabled", "bf16")):
        if path in given and given[path].value:
            stated.append((given[path], parse_dtype(name)))
    for (first, ours), (second, theirs) in pairwise(stated):
        if ours != theirs:
            raise contradiction(first, second, "weights have one dtype; keep one of them")
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


def _idle_nvme_path(given: Mapping[str, Given], *, writes: bool) -> str | None:
    """Return why no weights are written to `nvme_path`, judging by the configuration alone; None: some may be."""
    if OFFLOAD_DEVICE not in given or given[OFFLOAD_DEVICE].value != "nvme":
        return f'no weights are written there unless {OFFLOAD_DEVICE} is "nvme"'
    if not writes:
        return (
            "checkpoint files are read in place; only weights quantized by other tools are converted and written there"
        )
    return None
