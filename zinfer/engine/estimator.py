"""What work takes on this machine: memory before a model's blocks have their homes, seconds after."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from zinfer.config import Settings
from zinfer.errors import ConfigError
from zinfer.model.build import find_dtype
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec
from zinfer.planning.memory import Footprint, Request, beside_request, find_footprint
from zinfer.planning.placement import Plan
from zinfer.planning.step_time import PassClock, PassTime, Prediction, find_work
from zinfer.probe.known_rates import known_rates
from zinfer.probe.limits import MachineLimits, free_device_bytes
from zinfer.probe.rates import Rates


def beside_others(
    module: nn.Module,
    blocks: Sequence[ModelBlock],
    limits: MachineLimits,
    settings: Settings,
    reserve: Footprint | None,
) -> MachineLimits:
    """The budgets, less what others take of the device: by default the batch that the configuration states.

    Raises:
        ConfigError: it states one, and the module does not say how wide its activations are.
        PlanError: too little is left.
    """
    batch = settings.batch
    if reserve is not None:
        taken = reserve.dequantizing(block.block for block in blocks)
    elif batch.batch_size is None or batch.prompt_len is None or batch.new_tokens is None:
        return limits
    else:
        request = Request(batch.batch_size, batch.prompt_len, batch.new_tokens)
        taken = _footprint(module, blocks, request, "zinfer.batch_size", on_cuda=limits.on_cuda)
    return beside_request(limits, free_device_bytes(limits), settings, taken)


@dataclass(frozen=True)
class PassEstimator:
    """Seconds, of one model under one plan.

    The rates are those of `zinfer probe` if it has run here, else measured in a hurry at the first question, which
    takes about a second.

    Attributes:
        files: of the checkpoint; None for weights that were in memory.
        is_fused: whether fused kernels compute norms, rotations and gates.
    """

    module: nn.Module
    blocks: tuple[ModelBlock, ...]
    plan: Plan
    device: torch.device
    files: tuple[Path, ...] | None
    is_fused: bool

    def predict(self, request: Request) -> Prediction:
        """What a `generate` of this shape takes.

        Raises:
            ConfigError: files that cannot be read, or a module that does not say of what shape it is.
            PlanError: the model is no decoder that generates, or keeps a state whose size is not known.
        """
        footprint = _footprint(self.module, self.blocks, request, "predict", on_cuda=self.device.type == "cuda")
        return self._clock.predict(request, footprint)

    def pass_time(self, num_tokens: int, num_rows: int, **sizes: int) -> PassTime:
        """What one pass takes, by resource; arguments as for `PassClock.pass_time`."""
        return self._clock.pass_time(num_tokens, num_rows, **sizes)

    def disk_spares_time(self, token_bytes: int) -> bool:
        """As `PassClock.disk_spares_time`.

        The disk is the checkpoint's; of a module with its weights in memory no disk is known, and none spares anything.
        """
        return self.files is not None and self._clock.disk_spares_time(token_bytes)

    @functools.cached_property
    def rates(self) -> Rates:
        return known_rates(self.device, self.files)

    @property
    def known_rates(self) -> Rates | None:
        """The rates, if anything has asked for them."""
        return self.__dict__.get("rates")

    @functools.cached_property
    def _clock(self) -> PassClock:
        spec = replace(_spec(self.module, "predict"), is_fused=self.is_fused)
        return PassClock(self.plan, find_work(self.blocks, spec), self.rates)


def _footprint(
    module: nn.Module, blocks: Sequence[ModelBlock], request: Request, caller: str, *, on_cuda: bool
) -> Footprint:
    footprint = find_footprint(_spec(module, caller), find_dtype(module), request, on_cuda=on_cuda)
    return footprint.dequantizing(block.block for block in blocks)


def _spec(module: nn.Module, caller: str) -> ModelSpec:
    config = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ConfigError(
            f"{caller}: a {type(module).__name__} has no transformers config to tell widths and layers from; "
            "only transformers' models can be predicted"
        )
    return ModelSpec.of(cast(PreTrainedModel, module))
