"""Estimates memory before a model's blocks have homes, and seconds per pass after."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from zinfer.config import Settings
from zinfer.errors import ConfigError
from zinfer.model.build import find_dtype
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec
from zinfer.planning.block_work import find_work
from zinfer.planning.memory import Footprint, Request, find_footprint
from zinfer.planning.placement import Plan
from zinfer.planning.step_time import PassClock, PassTime, Prediction
from zinfer.probe.known_rates import known_rates
from zinfer.probe.rates import Rates


def beside_weights(
    module: nn.Module, blocks: Sequence[ModelBlock], settings: Settings, reserve: Footprint | None, *, on_cuda: bool
) -> Footprint | None:
    """Return what is needed on the device beside the weights; None if the configuration states no batch.

    Args:
        reserve: known to the caller, in place of the batch that the configuration states.

    Raises:
        ConfigError: a batch is stated, and the width of the module's activations is not known.
        PlanError: likewise, and the model is no decoder that generates.
    """
    batch = settings.batch
    if reserve is not None:
        return reserve.dequantizing(block.block for block in blocks)
    if batch.batch_size is None or batch.prompt_len is None or batch.new_tokens is None:
        return None
    request = Request(batch.batch_size, batch.prompt_len, batch.new_tokens)
    return _footprint(module, blocks, request, "zinfer.batch_size", on_cuda=on_cuda)


@dataclass(frozen=True)
class PassEstimator:
    """Predicts the seconds of passes, for one model under one plan.

    The rates are those of `zinfer probe` if it has run here. Otherwise the first prediction measures them roughly, in
    about a second.

    Attributes:
        files: of the checkpoint; None for weights that were in memory.
        is_fused: whether fused kernels compute norms, rotations and gates.
        num_local: ranks on this host; ``num_copies`` of the weights they stream.
    """

    module: nn.Module
    blocks: tuple[ModelBlock, ...]
    plan: Plan
    device: torch.device
    files: tuple[Path, ...] | None
    is_fused: bool
    num_local: int = 1
    num_copies: float = 1.0

    def predict(self, request: Request) -> Prediction:
        """Predict a `generate` of this shape.

        Raises:
            ConfigError: files that cannot be read, or a module without a transformers config.
            PlanError: the model is no decoder that generates, or keeps a state whose size is not known.
        """
        footprint = _footprint(self.module, self.blocks, request, "predict", on_cuda=self.device.type == "cuda")
        return self._clock.predict(request, footprint)

    def pass_time(self, num_tokens: int, num_rows: int, **sizes: Any) -> PassTime:
        """Return the time of one pass, by resource; arguments as for `PassClock.pass_time`."""
        return self._clock.pass_time(num_tokens, num_rows, **sizes)

    def disk_spares_time(self, token_bytes: int) -> bool:
        """As `PassClock.disk_spares_time`, for the checkpoint's disk; False for weights that were in memory."""
        return self.files is not None and self._clock.disk_spares_time(token_bytes)

    @functools.cached_property
    def rates(self) -> Rates:
        return known_rates(self.device, self.files).shared(self.num_local, self.num_copies)

    @property
    def known_rates(self) -> Rates | None:
        """The rates, if they were used before."""
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
