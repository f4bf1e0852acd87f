"""Plans a whole job by continuous batching: tokens a pass, sequences at once, homes of the weights, seconds. Pure.

Sizes that the configuration leaves open are chosen one after the other, each the fastest by simulation of a sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zinfer.config.settings import Batching
from zinfer.errors import PlanError
from zinfer.planning.kv_budget import BatchingBudget, HostShare, find_budget
from zinfer.planning.placement import Plan
from zinfer.planning.plan import Case
from zinfer.planning.simulation import JobEstimator, JobPrediction, Simulations

ROWS_TOGETHER: Final = 4096
"""Rows of a job that share passes before the next begin, four times as many as run at once by default: the last ones
run with few beside them."""

_TOKENS_PER_PASS: Final = (2048, 4096, 8192, 16_384, 32_768, 131_072)
_MAX_SEQUENCES: Final = (128, 512, 1024)
_KV_SHARES: Final = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)  # of device memory; weights placed there have the rest
_HOSTED_MAX_SEQUENCES: Final = (512, 1024, 4096)
_HOSTED_KV_SHARES: Final = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0)  # of what suits host and device
_CHOSEN: Final = ("tokens_per_pass", "max_sequences", "kv_cache_memory", "kv_cache_dtype", "kv_cache_tier")
"""Keys of the section `zinfer` that a plan states, or leaves at their defaults."""
_FEWEST_TURNS: Final = 3  # of the cache, that a simulation has to have for its middle to be like a whole job's
_FEWEST_SIMULATED: Final = 64
_MOST_SIMULATED: Final = 1024
_TURNS: Final = 6  # of the cache: its filling and emptying are then a small part


@dataclass(frozen=True)
class Job:
    """Prompts, and how many tokens are generated after each.

    Attributes:
        num_rows: of the whole job.
        prompt_lens, new_tokens: of a sample of its rows, one at least.
    """

    num_rows: int
    prompt_lens: Sequence[int]
    new_tokens: Sequence[int]

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the prompt, and new ones, of the longest row of the sample."""
        return max(zip(self.prompt_lens, self.new_tokens, strict=True), key=sum)

    def simulated(self, num_fitting: int) -> "Job":
        """The same with a sample of so many rows that passes are the usual ones, over and over where it is shorter.

        Args:
            num_fitting: sequences that the cache holds at once, at most.
        """
        count = min(self.num_rows, max(_FEWEST_SIMULATED, min(_TURNS * num_fitting, _MOST_SIMULATED)))
        places = [number % len(self.prompt_lens) for number in range(count)]
        return Job(self.num_rows, [self.prompt_lens[i] for i in places], [self.new_tokens[i] for i in places])


@dataclass(frozen=True)
class JobPlan:
    """A plan for one job.

    Attributes:
        case: that was planned for.
        batching: the sizes that were stated or chosen.
        budget: what they take.
        plan: homes of the weights beside it.
        job: with the rows that were simulated.
        simulated: what these take.
        seconds: of all rows.
        simulations: of these rows, made on the way, for further questions.
    """

    case: Case
    batching: Batching
    budget: BatchingBudget
    plan: Plan
    job: Job
    simulated: JobPrediction
    seconds: float
    simulations: Simulations = field(repr=False, compare=False)

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


def plan_job(case: Case, job: Job) -> JobPlan:
    """Choose the fastest sizes among those that the settings leave open.

    Raises:
        PlanError: nothing fits, not even the smallest sizes.
        ConfigError: a row is longer than the model or the configuration allows.
    """
    case.check_length(*job.longest)
    stated, device_bytes, kv = case.settings.batching, case.machine.device_memory_bytes, case.outline.spec.kv
    shares, usual_counts = [int(device_bytes * share) for share in _KV_SHARES], _MAX_SEQUENCES
    if stated.kv_cache_tier == "host":
        host = HostShare.find(case.outline.blocks, case.settings, case.machine.limits)
        usual_bytes = host.pages_bytes(kv, device_bytes)
        shares = sorted({min(int(usual_bytes * share), host.usual_bytes) for share in _HOSTED_KV_SHARES})
        usual_counts = _HOSTED_MAX_SEQUENCES
    # All of them simulate the same rows: fewer would count the filling and emptying of the cache for more.
    job = job.simulated(shares[-1] // kv.token_bytes(case.outline.dtype) // sum(job.longest))
    simulations = Simulations(job.prompt_lens, job.new_tokens, case.outline.spec.common_window)
    kv_bytes = shares if stated.kv_cache_memory is None else [stated.kv_cache_memory]
    sizes = _TOKENS_PER_PASS if stated.tokens_per_pass is None else [stated.tokens_per_pass]
    counts = usual_counts if stated.max_sequences is None else [stated.max_sequences]
    # How many tokens pay depends on the memory that is left for weights: both are tried together.
    usual = replace(stated, max_sequences=stated.max_sequences or usual_counts[1])
    tried = [replace(usual, tokens_per_pass=size, kv_cache_memory=nbytes) for nbytes in kv_bytes for size in sizes]
    best = _fastest(case, tried, job, simulations).batching
    return _fastest(case, [replace(best, max_sequences=count) for count in counts], job, simulations)


def _fastest(case: Case, choices: Sequence[Batching], job: Job, simulations: Simulations) -> JobPlan:
    """The fastest of those that fit; raises PlanError where none does."""
    found: list[JobPlan] = []
    failures: list[PlanError] = []
    for batching in choices:
        try:
            found.append(plan_sizes(case, batching, job, simulations))
        except PlanError as failure:
            failures.append(failure)
    if not found:
        raise failures[0]
    return min(found, key=lambda planned: planned.seconds)


def plan_sizes(case: Case, batching: Batching, job: Job, simulations: Simulations) -> JobPlan:
    """Plan a job with the sizes that ``batching`` states; raises PlanError where it does not fit."""
    outline, machine, settings = case.outline, case.machine, replace(case.settings, batching=batching)
    free_bytes, most_tokens = machine.device_memory_bytes, sum(job.longest)
    budget = find_budget(outline.spec, outline.dtype, outline.blocks, settings, machine.limits, free_bytes, most_tokens)
    plan = case.place(case.limits_beside(budget.footprint.dequantizing(outline.plain_blocks)))
    clock = case.clock(plan, is_fused=bool(settings.for_batches(on_cuda=machine.limits.on_cuda).kernel_inject))
    token_bytes = outline.spec.kv.token_bytes(budget.kv_dtype)
    if settings.offload.nvme_path is not None and clock.disk_spares_time(token_bytes):
        budget = replace(budget, swaps_to_disk=True)
    estimator = JobEstimator(budget, simulations.window, token_bytes, clock.pass_time)
    simulated = estimator.of_passes(simulations.under(budget))
    seconds = _whole_seconds(job, simulated, is_hosted=budget.is_hosted)
    return JobPlan(case, batching, budget, plan, job, simulated, seconds, simulations)


def _whole_seconds(job: Job, simulated: JobPrediction, *, is_hosted: bool) -> float:
    """Of all rows, from those that were simulated: more of them before the next begin are more of the middle.

    Where pages in host memory hold so many sequences that the simulation has no middle, more rows take as long as
    these.
    """
    count = len(job.prompt_lens)
    row_s = simulated.steady_s_per_token * simulated.num_passes * simulated.tokens_per_pass / count
    if is_hosted and count < _FEWEST_TURNS * simulated.most_together:
        row_s = simulated.seconds / count

    def seconds_of(num_rows: int) -> float:
        if num_rows <= count:
            return simulated.seconds * num_rows / count
        return simulated.seconds + (num_rows - count) * row_s

    whole, rest = divmod(job.num_rows, ROWS_TOGETHER)
    return whole * seconds_of(ROWS_TOGETHER) + seconds_of(rest)
