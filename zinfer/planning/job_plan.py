"""Plans a whole job by continuous batching: tokens a pass, texts at once, homes of the weights, seconds. Pure.

Sizes that the configuration leaves open are chosen one after the other, each the fastest by rehearsal on a sample.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from zinfer.config import Settings
from zinfer.config.settings import Batching
from zinfer.errors import PlanError
from zinfer.planning.advice import LEAST_GAIN, quantized_outlines
from zinfer.planning.block_work import find_work
from zinfer.planning.forecast import beside_request, check_length
from zinfer.planning.host_memory import HostRoom
from zinfer.planning.job_estimator import JobEstimator
from zinfer.planning.kv_budget import BatchingBudget, find_budget
from zinfer.planning.outline import Outline
from zinfer.planning.planner import Plan, make_plan
from zinfer.planning.prediction import PassClock, disk_spares_time
from zinfer.planning.presets import Machine
from zinfer.planning.simulation import JobPrediction
from zinfer.planning.simulations import Rehearsals
from zinfer.quantization.slab_matrix import most_dequantized_bytes
from zinfer.units import duration

ROWS_TOGETHER: Final = 4096
"""Rows of a job that share passes before the next begin, four times as many as run at once by default: the last ones
run with few beside them."""

_TOKENS_PER_PASS: Final = (2048, 4096, 8192, 16_384, 32_768, 131_072)
_MAX_SEQUENCES: Final = (128, 512, 1024)
_KV_SHARES: Final = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)  # of device memory; the weights at home there have the rest
_HOSTED_MAX_SEQUENCES: Final = (512, 1024, 4096)
_HOSTED_KV_SHARES: Final = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0)  # of what suits host and device
_CHOSEN: Final = ("tokens_per_pass", "max_sequences", "kv_cache_memory", "kv_cache_dtype", "kv_cache_tier")
"""Keys of the section `zinfer` that a plan states, or leaves at their defaults."""
_FEWEST_TURNS: Final = 3  # of the cache, that a rehearsal has to have for its middle to be like a whole job's
_FEWEST_REHEARSED: Final = 64
_MOST_REHEARSED: Final = 1024
_TURNS: Final = 6  # of the cache: its filling and emptying are then a small part


@dataclass(frozen=True)
class Job:
    """Prompts, and how many tokens come after each.

    Attributes:
        num_rows: of the whole job.
        prompt_lens, new_tokens: of a sample of its rows, one at least.
    """

    num_rows: int
    prompt_lens: Sequence[int]
    new_tokens: Sequence[int]

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the prompt, and new ones, of the longest text of the sample."""
        return max(zip(self.prompt_lens, self.new_tokens, strict=True), key=sum)

    @property
    def most_tokens(self) -> int:
        """Of the longest text of the sample, at its end."""
        return sum(self.longest)

    def rehearsing(self, num_fitting: int) -> "Job":
        """The same with a sample of so many rows that passes are the usual ones, over and over where it is shorter.

        Args:
            num_fitting: texts that the cache holds at once, at most.
        """
        count = min(self.num_rows, max(_FEWEST_REHEARSED, min(_TURNS * num_fitting, _MOST_REHEARSED)))
        places = [number % len(self.prompt_lens) for number in range(count)]
        return Job(self.num_rows, [self.prompt_lens[i] for i in places], [self.new_tokens[i] for i in places])


@dataclass(frozen=True)
class JobPlan:
    """What came out.

    Attributes:
        batching: the sizes that were stated or chosen.
        budget: what they take.
        plan: homes of the weights beside it.
        job: with the rows that were rehearsed.
        rehearsed: what these take.
        seconds: of all rows.
        rehearsals: of these rows, made on the way, for whoever asks on.
    """

    batching: Batching
    budget: BatchingBudget
    plan: Plan
    job: Job
    rehearsed: JobPrediction
    seconds: float
    rehearsals: Rehearsals = field(repr=False, compare=False)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of the whole job a second."""
        return self.job.num_rows * sum(self.job.new_tokens) / len(self.job.new_tokens) / self.seconds

    def keys(self) -> dict[str, Any]:
        """As the section `zinfer` of a configuration."""
        named: dict[str, Any] = {
            "tokens_per_pass": self.budget.tokens_per_pass,
            "max_sequences": self.budget.max_sequences,
            "kv_cache_memory": self.budget.kv_bytes,
        }
        for key, usual in (("kv_cache_dtype", "auto"), ("kv_cache_tier", "device")):
            if (stated := getattr(self.batching, key)) != usual:
                named[key] = stated
        return named

    def configuration(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A whole configuration: the one that was planned with, and in its section `zinfer` the keys of this plan.

        Args:
            given: the configuration as it was written.
        """
        stated = given.get("zinfer")
        kept = {key: value for key, value in stated.items() if key not in _CHOSEN} if isinstance(stated, dict) else {}
        return {**given, "zinfer": {**kept, **self.keys()}}


def plan_job(outline: Outline, machine: Machine, settings: Settings, job: Job) -> JobPlan:
    """The fastest sizes among those that are open.

    Raises:
        PlanError: nothing fits, not even the smallest sizes.
        ConfigError: a text is longer than the model or the configuration allows.
    """
    check_length(outline, settings, *job.longest)
    return _choose(outline, machine, settings, job)


def _choose(outline: Outline, machine: Machine, settings: Settings, job: Job) -> JobPlan:
    """The fastest sizes among those that the settings leave open; raises PlanError where nothing fits."""
    stated = settings.batching
    shares, usual_counts = [int(machine.device_memory_bytes * share) for share in _KV_SHARES], _MAX_SEQUENCES
    if stated.kv_cache_tier == "host":
        room = HostRoom.find(outline.blocks, settings, machine.limits)
        usual_bytes = room.usual_pages_bytes(outline.spec.kv, machine.device_memory_bytes)
        shares = sorted({min(int(usual_bytes * share), room.usual_bytes) for share in _HOSTED_KV_SHARES})
        usual_counts = _HOSTED_MAX_SEQUENCES
    # All of them rehearse the same rows: fewer would count the filling and emptying of the cache for more.
    job = job.rehearsing(shares[-1] // outline.spec.kv.token_bytes(outline.dtype) // job.most_tokens)
    rehearsals = Rehearsals(job.prompt_lens, job.new_tokens, outline.spec.common_window)
    kv_bytes = shares if stated.kv_cache_memory is None else [stated.kv_cache_memory]
    sizes = _TOKENS_PER_PASS if stated.tokens_per_pass is None else [stated.tokens_per_pass]
    counts = usual_counts if stated.max_sequences is None else [stated.max_sequences]
    # How many tokens pay depends on the memory that is left for weights: both are tried together.
    usual = replace(stated, max_sequences=stated.max_sequences or usual_counts[1])
    tried = [replace(usual, tokens_per_pass=size, kv_cache_memory=nbytes) for nbytes in kv_bytes for size in sizes]
    best = _fastest(outline, machine, settings, tried, job, rehearsals).batching
    tried = [replace(best, max_sequences=count) for count in counts]
    return _fastest(outline, machine, settings, tried, job, rehearsals)


def job_advice(
    outline: Outline, machine: Machine, settings: Settings, planned: JobPlan, given: Mapping[str, Any] | None = None
) -> list[str]:
    """Changes that pay, the largest gain first; each is by itself. Those of numbers lose a little accuracy.

    Args:
        outline, machine, settings: as for `plan_job`, whose plan is ``planned``.
        given: the configuration as it was written, for advice that is a whole one.
    """
    tried: list[tuple[str, Outline, Batching]] = []
    if planned.batching.kv_cache_dtype == "auto":
        tried.append(('zinfer.kv_cache_dtype "int8"', outline, replace(planned.batching, kv_cache_dtype="int8")))
    if planned.plan.streamed_bytes:
        tried += [(words, smaller, planned.batching) for words, smaller in quantized_outlines(outline, settings)]
    found: list[tuple[float, str]] = []

    def compare(words: str, then: JobPlan) -> None:
        if (gain := planned.seconds / then.seconds) >= LEAST_GAIN:
            found.append((gain, f"{words}: {duration(then.seconds)}, {gain:.3g} times as fast"))

    for words, other, batching in tried:
        with suppress(PlanError):
            compare(words, _try(other, machine, settings, batching, planned.job, planned.rehearsals))
    if (moved := _in_other_memory(outline, machine, settings, planned.job)) is not None:
        where = "host" if moved.budget.is_hosted else "device"
        compare(f"KV cache in {where} memory, {json.dumps(moved.configuration(given or {}))}", moved)
    return [words for _, words in sorted(found, reverse=True)]


def fitting_changes(outline: Outline, machine: Machine, settings: Settings, job: Job) -> Iterator[str]:
    """What would do where a job does not fit: each change was planned, and does."""
    for words, smaller in quantized_outlines(outline, settings):
        if fits(smaller, machine, settings, job):
            yield words


def fits(outline: Outline, machine: Machine, settings: Settings, job: Job) -> bool:
    """Whether there are sizes with which the job can be run."""
    try:
        plan_job(outline, machine, settings, job)
    except PlanError:
        return False
    return True


def _in_other_memory(outline: Outline, machine: Machine, settings: Settings, job: Job) -> JobPlan | None:
    """The fastest sizes with keys and values at home where they are not now; None where that is no choice."""
    if not machine.limits.on_cuda or not settings.offload.pin_memory:
        return None
    stated = settings.batching
    other: Literal["device", "host"] = "host" if stated.kv_cache_tier == "device" else "device"
    batching = replace(stated, kv_cache_tier=other, kv_cache_memory=None)  # what is stated is of the one memory alone
    try:
        return _choose(outline, machine, replace(settings, batching=batching), job)
    except PlanError:
        return None


def _fastest(
    outline: Outline,
    machine: Machine,
    settings: Settings,
    choices: Sequence[Batching],
    job: Job,
    rehearsals: Rehearsals,
) -> JobPlan:
    """The fastest of those that fit; raises PlanError where none does."""
    found: list[JobPlan] = []
    failures: list[PlanError] = []
    for batching in choices:
        try:
            found.append(_try(outline, machine, settings, batching, job, rehearsals))
        except PlanError as failure:
            failures.append(failure)
    if not found:
        raise failures[0]
    return min(found, key=lambda planned: planned.seconds)


def _try(
    outline: Outline, machine: Machine, settings: Settings, batching: Batching, job: Job, rehearsals: Rehearsals
) -> JobPlan:
    """Raises PlanError where it does not fit."""
    free_bytes, trying = machine.device_memory_bytes, replace(settings, batching=batching)
    budget = find_budget(
        outline.spec, outline.dtype, outline.blocks, trying, machine.limits, free_bytes, job.most_tokens
    )
    blocks = [block.block for block in outline.blocks]
    taken = budget.footprint
    taken = replace(taken, activation_bytes=taken.activation_bytes + most_dequantized_bytes(blocks))
    limits = beside_request(machine.limits, free_bytes, settings, taken)
    plan = make_plan(blocks, outline.layers, limits, settings)
    is_fused = bool(settings.for_batches(on_cuda=machine.limits.on_cuda).kernel_inject)
    work, rates = find_work(outline.blocks, replace(outline.spec, is_fused=is_fused)), machine.rates
    token_bytes = outline.spec.kv.token_bytes(budget.kv_dtype)
    if settings.offload.nvme_path is not None and disk_spares_time(work, rates, token_bytes):
        budget = replace(budget, parks_on_disk=True)
    outlook = JobEstimator(budget, rehearsals.window, token_bytes, PassClock(plan, work, rates).pass_time)
    predicted = outlook.of_passes(rehearsals.under(budget))
    seconds = _whole_seconds(job, predicted, is_hosted=budget.is_hosted)
    return JobPlan(batching, budget, plan, job, predicted, seconds, rehearsals)


def _whole_seconds(job: Job, rehearsed: JobPrediction, *, is_hosted: bool) -> float:
    """Of all rows, from those that were rehearsed: more of them before the next begin are more of the middle.

    Where pages in host memory hold so many texts that the rehearsal has no middle, more rows take as long as these.
    """
    count = len(job.prompt_lens)
    row_s = rehearsed.steady_s_per_token * rehearsed.num_passes * rehearsed.tokens_per_pass / count
    if is_hosted and count < _FEWEST_TURNS * rehearsed.most_together:
        row_s = rehearsed.seconds / count

    def seconds_of(num_rows: int) -> float:
        if num_rows <= count:
            return rehearsed.seconds * num_rows / count
        return rehearsed.seconds + (num_rows - count) * row_s

    whole, rest = divmod(job.num_rows, ROWS_TOGETHER)
    return whole * seconds_of(ROWS_TOGETHER) + seconds_of(rest)
