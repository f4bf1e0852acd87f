"""Suggest changes for more tokens per second: each one is planned and predicted, and named only if it is faster."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import ConfigError, PlanError
from zinfer.offload.block import Tier
from zinfer.planning.job_plan import Job, JobPlan, plan_sizes
from zinfer.planning.job_search import open_tiers, plan_job
from zinfer.planning.memory import Request
from zinfer.planning.plan import BatchPlan, Case, fit_batch
from zinfer.planning.step_time import speed
from zinfer.units import duration, human_bytes

_Plan = TypeVar("_Plan", BatchPlan, JobPlan)
_QUANTIZED: Final[tuple[tuple[Literal[4, 8], int | None], ...]] = ((8, None), (4, 128))
_QUANTIZATION: Final = "zinfer.quantization"
_DISK: Final = "disk"
_DISKS: Final = (2, 4)
_LEAST_GAIN: Final = 1.05  # less is within the error of the prediction


@dataclass(frozen=True)
class Advice:
    """One change of a batch. ``gain`` is the speedup: tokens per second with it over those without it."""

    change: str
    tokens_per_s: float
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {speed(self.tokens_per_s)}, {self.gain:.3g} times as many"

    @property
    def weights(self) -> str | None:
        """The weights that the change quantizes to, such as ``INT4 weights``; None if it does not."""
        return _weights(self.change)


@dataclass(frozen=True)
class JobAdvice:
    """One change of a job. ``gain`` is the speedup: seconds without it over those with it."""

    change: str
    seconds: float
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {duration(self.seconds)}, {self.gain:.3g} times as fast"

    @property
    def weights(self) -> str | None:
        """As that of `Advice`."""
        return _weights(self.change)


def _weights(change: str) -> str | None:
    found = re.match(rf'{re.escape(_QUANTIZATION)} {{"bits": (\d)', change)
    return f"INT{found[1]} weights" if found else None


def advise(planned: BatchPlan) -> tuple[Advice, ...]:
    """Return changes that speed up the plan, largest gain first; each is tried alone."""
    now = planned.prediction.tokens_per_s
    tried = (_without_offload_device, _with_host_memory, _with_larger_batch, _with_quantized_weights, _with_more_disks)
    changes = [(change, then.prediction.tokens_per_s) for each in tried for change, then in each(planned)]
    found = [Advice(change, then, then / now) for change, then in changes if then >= now * _LEAST_GAIN]
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def fitting_changes(case: Case, request: Request) -> Iterator[str]:
    """Yield changes that make a request fit; each one has been planned."""
    job = Job(request.batch_size, [request.prompt_len], [request.new_tokens])
    if _try(partial(plan_job, is_rough=True), case, job):
        yield f"a job that shares its passes (--rows {request.batch_size} instead of --batch-size)"
    batch_size = request.batch_size
    while batch_size := batch_size // 2:
        if _try(fit_batch, case, replace(request, batch_size=batch_size)):
            yield f"--batch-size {batch_size}"
            break
    for change, smaller in _quantized(case):
        if _try(fit_batch, smaller, request):
            yield change


def job_advice(planned: JobPlan, settings: Settings, given: Mapping[str, Any] | None = None) -> list[JobAdvice]:
    """Return changes that speed up the job, largest gain first; each is tried alone. Quantization loses some accuracy.

    Args:
        planned: the fastest plan within the settings.
        settings: what was stated.
        given: the configuration as written, for advice that prints a whole one.
    """
    case, batching = planned.case, planned.batching
    tried = []
    if batching.kv_cache_dtype == "auto":
        tried.append(('zinfer.kv_cache_dtype "int8"', case, replace(batching, kv_cache_dtype="int8")))
    if planned.plan.streamed_bytes:
        tried += [(words, smaller, batching) for words, smaller in _quantized(case)]
    if planned.simulated.bottleneck == _DISK:
        tried += [(words, other, batching) for words, other in _striped(case)]
    plans: list[tuple[str, JobPlan]] = []
    for words, other, sizes in tried:
        if then := _try(plan_sizes, other, sizes, planned.job, planned.simulations):
            plans.append((words, then))
    if moved := _in_other_memory(planned, settings):
        where = "host" if moved.budget.is_hosted else "device"
        plans.append((f"KV cache in {where} memory, {json.dumps(moved.configuration(given or {}))}", moved))
    found = [JobAdvice(words, then.seconds, planned.seconds / then.seconds) for words, then in plans]
    return sorted((each for each in found if each.gain >= _LEAST_GAIN), key=lambda advice: -advice.gain)


def fitting_job_changes(case: Case, job: Job) -> Iterator[str]:
    """Yield changes that make a job fit; each one has been planned."""
    for words, smaller in _quantized(case):
        if _try(partial(plan_job, is_rough=True), smaller, job):
            yield words


def _without_offload_device(planned: BatchPlan) -> Iterator[tuple[str, BatchPlan]]:
    """Try without offload_param.device, which keeps layers off faster memory even if that is idle."""
    settings = planned.case.settings
    device = settings.offload.device
    if device in (None, "none"):
        return
    freed = replace(settings, offload=replace(settings.offload, device=None))
    then = _try(fit_batch, replace(planned.case, settings=freed), planned.request)
    if then is not None:
        idle_bytes = planned.limits.device_bytes - planned.plan.device_bytes
        yield (
            f'remove zero_optimization.offload_param.device "{device}", which leaves {human_bytes(idle_bytes)} of '
            f"device memory idle",
            then,
        )


def _with_host_memory(planned: BatchPlan) -> Iterator[tuple[str, BatchPlan]]:
    """Try enough host memory that no block stays on disk."""
    settings, machine = planned.case.settings, planned.case.machine
    if not planned.plan.num_blocks(Tier.DISK) or settings.offload.device == "nvme":
        return
    memory = replace(settings.memory, max_host_memory=None, max_pinned_memory=None)
    freed = replace(settings, memory=memory, offload=replace(settings.offload, max_in_cpu=None))
    larger = replace(machine, limits=replace(machine.limits, host_bytes=sys.maxsize, pinned_bytes=sys.maxsize))
    then = _try(fit_batch, replace(planned.case, machine=larger, settings=freed), planned.request)
    if then is not None:
        needed, had = then.plan.host_bytes, planned.limits.host_bytes
        change = "raise zinfer.max_pinned_memory or remove offload_param.max_in_cpu"
        if needed > had:
            change = f"{human_bytes(needed)} of host memory for weights instead of {human_bytes(had)}"
        yield f"{change}, so that nothing stays on disk", then


def _with_larger_batch(planned: BatchPlan) -> Iterator[tuple[str, BatchPlan]]:
    """Double the batch while it fits and is within the free tokens; yield the fastest."""
    best, batch_size = planned, planned.request.batch_size
    while (batch_size := batch_size * 2) <= planned.prediction.free_tokens:
        then = _try(fit_batch, planned.case, replace(planned.request, batch_size=batch_size))
        if then is None:
            break
        if then.prediction.tokens_per_s > best.prediction.tokens_per_s:
            best = then
    if best is not planned:
        yield f"a batch of {best.request.batch_size:,} prompts", best


def _with_quantized_weights(planned: BatchPlan) -> Iterator[tuple[str, BatchPlan]]:
    """Try quantized weights, which stream fewer bytes."""
    for change, smaller in _quantized(planned.case) if planned.plan.streamed_bytes else ():
        if then := _try(fit_batch, smaller, planned.request):
            yield change, then


def _with_more_disks(planned: BatchPlan) -> Iterator[tuple[str, BatchPlan]]:
    """Try several disks as one, if the disk bounds."""
    for change, faster in _striped(planned.case) if planned.prediction.decode.bottleneck == _DISK else ():
        if then := _try(fit_batch, faster, planned.request):
            yield change, then


def _striped(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield numbers of disks like the checkpoint's that are read as one, each with the case on them."""
    rates = case.machine.rates
    for count in _DISKS:
        faster = replace(rates, disk_bytes_per_s=count * rates.disk_bytes_per_s)
        yield f"{count} such disks as one (RAID 0)", replace(case, machine=replace(case.machine, rates=faster))


def _quantized(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield quantization settings for an unquantized model, each with the case of the quantized model."""
    tensors = (tensor for block in case.outline.plain_blocks for tensor in block.layout.tensors)
    if case.settings.quantization is not None or any(tensor.dequantized_bytes for tensor in tensors):
        return
    for bits, group_size in _QUANTIZED:
        rules = Quantization((QuantRule(bits=bits, group_size=group_size),))
        try:
            smaller = case.outline.quantized(rules)
        except ConfigError:  # the groups do not divide this model's matrices
            continue
        groups = "" if group_size is None else f', "group_size": {group_size}'
        yield f'{_QUANTIZATION} {{"bits": {bits}{groups}}}', replace(case, outline=smaller)


def _in_other_memory(planned: JobPlan, settings: Settings) -> JobPlan | None:
    """Return the fastest plan with the KV cache in the other memory; None if that is not possible, or was compared."""
    case, stated = planned.case, planned.case.settings.batching
    was_compared = len(open_tiers(replace(case, settings=settings))) > 1
    if was_compared or not case.machine.limits.on_cuda or not case.settings.offload.pin_memory:
        return None
    other: Literal["device", "host"] = "host" if stated.kv_cache_tier == "device" else "device"
    batching = replace(stated, kv_cache_tier=other, kv_cache_memory=None)  # the stated size is for the other memory
    return _try(plan_job, replace(case, settings=replace(case.settings, batching=batching)), planned.job)


def _try(plan: Callable[..., _Plan], *args: Any) -> _Plan | None:
    """Return the plan, or None if it does not fit."""
    try:
        return plan(*args)
    except PlanError:
        return None
