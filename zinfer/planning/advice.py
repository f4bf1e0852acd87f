"""What to change for more tokens a second: each change is planned and predicted anew, and named only if it pays."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from zinfer.config import Memory, Settings
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import ConfigError, PlanError
from zinfer.offload.block import Tier
from zinfer.planning.forecast import Forecast, make_forecast
from zinfer.planning.outline import Outline
from zinfer.planning.prediction import speed
from zinfer.planning.presets import Machine
from zinfer.planning.request import Request
from zinfer.quantization.slab_matrix import SlabMatrix
from zinfer.units import human_bytes

_QUANTIZED: Final[tuple[tuple[Literal[4, 8], int | None], ...]] = ((8, None), (4, 128))
LEAST_GAIN: Final = 1.05  # less is within the prediction's own error


@dataclass(frozen=True)
class Advice:
    """One change. ``gain`` is tokens a second with it over those without it."""

    change: str
    tokens_per_s: float
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {speed(self.tokens_per_s)}, {self.gain:.3g} times as many"


def advise(outline: Outline, machine: Machine, settings: Settings, forecast: Forecast) -> tuple[Advice, ...]:
    """Changes that pay, the largest gain first; each is by itself, on top of the forecast's own circumstances."""
    now = forecast.prediction.tokens_per_s
    changes = [
        *_without_offload_device(outline, machine, settings, forecast),
        *_with_host_memory(outline, machine, settings, forecast),
        *_with_larger_batch(outline, machine, settings, forecast),
        *_with_quantized_weights(outline, machine, settings, forecast),
    ]
    found = [Advice(change, then, then / now) for change, then in changes if then >= now * LEAST_GAIN]
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def fitting_changes(outline: Outline, machine: Machine, settings: Settings, request: Request) -> Iterator[str]:
    """What would do where a request does not fit: each change was planned, and does."""
    batch_size = request.batch_size
    while batch_size := batch_size // 2:
        if _try(outline, machine, settings, replace(request, batch_size=batch_size)) is not None:
            yield f"--batch-size {batch_size}"
            break
    for change, smaller in quantized_outlines(outline, settings):
        if _try(smaller, machine, settings, request) is not None:
            yield change


def _without_offload_device(
    outline: Outline, machine: Machine, settings: Settings, forecast: Forecast
) -> Iterator[tuple[str, float]]:
    """An explicit device keeps layers off faster memory, however much of that lies idle."""
    device = settings.offload.device
    if device in (None, "none"):
        return
    freed = replace(settings, offload=replace(settings.offload, device=None))
    then = _try(outline, machine, freed, forecast.request)
    if then is None:
        return
    idle_bytes = forecast.limits.device_bytes - forecast.plan.device_bytes
    yield (
        f'remove zero_optimization.offload_param.device "{device}", which leaves {human_bytes(idle_bytes)} of device '
        f"memory idle",
        then.prediction.tokens_per_s,
    )


def _with_host_memory(
    outline: Outline, machine: Machine, settings: Settings, forecast: Forecast
) -> Iterator[tuple[str, float]]:
    """Enough host memory that no block is left on disk."""
    if not forecast.plan.num_blocks(Tier.DISK) or settings.offload.device == "nvme":
        return
    memory = Memory(max_device_memory=settings.memory.max_device_memory)
    freed = replace(settings, memory=memory, offload=replace(settings.offload, max_in_cpu=None))
    limits = replace(machine.limits, host_bytes=sys.maxsize, pinned_bytes=sys.maxsize)
    then = _try(outline, replace(machine, limits=limits), freed, forecast.request)
    if then is None:
        return
    needed, had = then.plan.host_bytes, forecast.limits.host_bytes
    if needed > had:
        change = f"{human_bytes(needed)} of host memory for weights instead of {human_bytes(had)}"
    else:
        change = "raise zinfer.max_pinned_memory or remove offload_param.max_in_cpu"
    yield f"{change}, so that nothing stays on disk", then.prediction.tokens_per_s


def _with_larger_batch(
    outline: Outline, machine: Machine, settings: Settings, forecast: Forecast
) -> Iterator[tuple[str, float]]:
    """The batch, doubled again and again up to the free tokens, that gives the most while it fits."""
    request, best, batch_size = forecast.request, forecast, forecast.request.batch_size
    while (batch_size := batch_size * 2) <= forecast.prediction.free_tokens:
        then = _try(outline, machine, settings, replace(request, batch_size=batch_size))
        if then is None:
            break
        if then.prediction.tokens_per_s > best.prediction.tokens_per_s:
            best = then
    if best is not forecast:
        yield f"a batch of {best.request.batch_size:,} prompts", best.prediction.tokens_per_s


def _with_quantized_weights(
    outline: Outline, machine: Machine, settings: Settings, forecast: Forecast
) -> Iterator[tuple[str, float]]:
    """Fewer bytes to bring in."""
    if not forecast.plan.streamed_bytes:
        return
    for change, smaller in quantized_outlines(outline, settings):
        then = _try(smaller, machine, settings, forecast.request)
        if then is not None:
            yield change, then.prediction.tokens_per_s


def quantized_outlines(outline: Outline, settings: Settings) -> Iterator[tuple[str, Outline]]:
    """The formats worth trying for a model whose weights are in full, in words, and the model in them."""
    if settings.quantization is not None or _is_quantized(outline):
        return
    for bits, group_size in _QUANTIZED:
        rules = Quantization((QuantRule(bits=bits, group_size=group_size),))
        try:
            smaller = outline.quantized(rules)
        except ConfigError:  # the groups do not divide this model's matrices
            continue
        groups = "" if group_size is None else f', "group_size": {group_size}'
        yield f'zinfer.quantization {{"bits": {bits}{groups}}}', smaller


def _is_quantized(outline: Outline) -> bool:
    return any(isinstance(tensor, SlabMatrix) for block in outline.blocks for tensor in block.block.layout.tensors)


def _try(outline: Outline, machine: Machine, settings: Settings, request: Request) -> Forecast | None:
    """The forecast, None where it does not fit."""
    try:
        return make_forecast(outline, machine, settings, request)
    except PlanError:
        return None
