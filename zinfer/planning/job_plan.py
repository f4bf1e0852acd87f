"""Plan a job with continuous batching: tokens per pass, sequences at once, homes of the weights, seconds. Pure.

Sizes that the configuration leaves open are chosen by simulating a sample of the rows.
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
"""Default batch size of a job, in rows. Four times the default of sequences at once, because the last rows of a batch
run in small passes."""

_TOKENS_PER_PASS: Final = (2048, 4096, 8192, 16_384, 32_768, 131_072)
_MAX_SEQUENCES: Final = (128, 512, 1024)
_KV_SHARES: Final = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)  # of device memory; the rest is for weights
_HOSTED_MAX_SEQUENCES: Final = (512, 1024, 4096)
_HOSTED_KV_SHARES: Final = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0)  # of the usual size
_CHOSEN: Final = ("tokens_per_pass", "max_sequences", "kv_cache_memory", "kv_cache_dtype", "kv_cache_tier")
"""Keys of the section `zinfer` that a plan sets, or leaves at their defaults."""
_FEWEST_TURNS: Final = 3  # of the cache: simulations with fewer have no steady middle
_FEWEST_SIMULATED: Final = 64
_MOST_SIMULATED: Final = 1024
_MOST_ROUGHLY_SIMULATED: Final = 512
_TURNS: Final = 6  # of the cache: enough for its filling and draining to be a small part


@dataclass(frozen=True)
class Job:
    """Prompt lengths and new tokens of a job.

    Attributes:
        num_rows: rows of the whole job.
        prompt_lens, new_tokens: tokens of each row in a sample of at least one.
    """

    num_rows: int
    prompt_lens: Sequence[int]
    new_tokens: Sequence[int]

    @property
    def longest(self) -> tuple[int, int]:
        """Prompt length and new tokens of the longest row in the sample."""
        return max(zip(self.prompt_lens, self.new_tokens, strict=True), key=sum)

    def part(self, count: int) -> "Job":
        """Return the part of one group of ranks, of so many groups."""
        return replace(self, num_rows=-(-self.num_rows // count))

    def simulated(self, num_fitting: int, most: int) -> "Job":
        """Return the job with a sample large enough to simulate typical passes; repeats rows if it has too few.

        Args:
            num_fitting: maximum sequences in the cache at once.
            most: maximum rows of the sample.
        """
        count = min(self.num_rows, max(_FEWEST_SIMULATED, min(_TURNS * num_fitting, most)))
        places = [number % len(self.prompt_lens) for number in range(count)]
        return Job(self.num_rows, [self.prompt_lens[i] for i in places], [self.new_tokens[i] for i in places])


@dataclass(frozen=True)
class JobPlan:
    """A plan for one job.

    Attributes:
        case: the planned case.
        batching: stated or chosen sizes.
        budget: memory for these sizes.
        plan: placement of the weights.
        job: the job, with the simulated rows.
        simulated: prediction for the simulated rows.
        seconds: time for all rows.
        simulations: cached simulations of these rows.
        estimator: of its passes.
    """

    case: Case
    batching: Batching
    budget: BatchingBudget
    plan: Plan
    job: Job
    simulated: JobPrediction
    seconds: float
    simulations: Simulations = field(repr=False, compare=False)
    estimator: JobEstimator = field(repr=False, compare=False)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second over the whole job."""
        return self.job.num_rows * sum(self.job.new_tokens) / len(self.job.new_tokens) / self.seconds

    def keys(self) -> dict[str, Any]:
        """Return the chosen sizes as keys of the section `zinfer`."""
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
        """Return a whole configuration with this plan's keys in its section `zinfer`.

        Args:
            given: the configuration as written.
        """
        stated = given.get("zinfer")
        kept = {key: value for key, value in stated.items() if key not in _CHOSEN} if isinstance(stated, dict) else {}
        return {**given, "zinfer": {**kept, **self.keys()}}


def plan_job(case: Case, job: Job, *, is_rough: bool = False) -> JobPlan:
    """Plan a job; choose the fastest values for sizes that the settings leave open.

    Args:
        case: the model, the machine and the settings.
        job: the job.
        is_rough: try a few sizes only, which takes a fifth of the time and is for comparing cases.

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
    # All choices simulate the same rows: with fewer rows, filling and draining the cache would weigh more.
    most = _MOST_ROUGHLY_SIMULATED if is_rough else _MOST_SIMULATED
    job = job.simulated(shares[-1] // kv.token_bytes(case.outline.dtype) // sum(job.longest), most)
    simulations = Simulations(job.prompt_lens, job.new_tokens, case.outline.spec.common_window)
    kv_bytes = shares if stated.kv_cache_memory is None else [stated.kv_cache_memory]
    sizes: Sequence[int] = _TOKENS_PER_PASS if stated.tokens_per_pass is None else [stated.tokens_per_pass]
    counts = usual_counts if stated.max_sequences is None else [stated.max_sequences]
    if is_rough:
        kv_bytes, sizes = kv_bytes[1::2] or kv_bytes, list(sizes[1::2]) or sizes
    # The best number of tokens depends on the memory left for weights, so both are tried together.
    usual = replace(stated, max_sequences=stated.max_sequences or usual_counts[1])
    tried = [replace(usual, tokens_per_pass=size, kv_cache_memory=nbytes) for nbytes in kv_bytes for size in sizes]
    found = _fastest(case, tried, job, simulations)
    if is_rough:
        return found
    return _fastest(case, [replace(found.batching, max_sequences=count) for count in counts], job, simulations)


def _fastest(case: Case, choices: Sequence[Batching], job: Job, simulations: Simulations) -> JobPlan:
    """Return the fastest plan that fits. Raises PlanError if none does."""
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
    """Plan a job with the sizes in ``batching``. Raises PlanError if it does not fit."""
    outline, machine, settings = case.outline, case.machine, replace(case.settings, batching=batching)
    free_bytes, most_tokens = machine.device_memory_bytes, sum(job.longest)
    budget = find_budget(outline.spec, outline.dtype, outline.blocks, settings, machine.limits, free_bytes, most_tokens)
    plan = case.place(case.limits_beside(budget.footprint.dequantizing(outline.plain_blocks)))
    clock = case.clock(plan, is_fused=bool(settings.for_batches(on_cuda=machine.limits.on_cuda).kernel_inject))
    token_bytes = outline.spec.kv.token_bytes(budget.kv_dtype)
    if settings.offload.nvme_path is not None and clock.disk_spares_time(token_bytes):
        budget = replace(budget, swaps_to_disk=True)
    latency_s = batching.max_token_latency_s
    estimator = JobEstimator(budget, simulations.window, token_bytes, clock.pass_time, latency_s)
    simulated = estimator.of_passes(simulations.under(budget, estimator.order))
    seconds = _whole_seconds(job, simulated, is_hosted=budget.is_hosted)
    return JobPlan(case, batching, budget, plan, job, simulated, seconds, simulations, estimator)


def _whole_seconds(job: Job, simulated: JobPrediction, *, is_hosted: bool) -> float:
    """Extrapolate the seconds of all rows, at the pace of the simulation's steady middle.

    If pages in host memory hold so many sequences that there is no steady middle, use the average pace instead.
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
