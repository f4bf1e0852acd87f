"""Plan a job with continuous batching, for given sizes: homes of the weights, memory, seconds. Pure.

`zinfer.planning.job_search` finds the sizes that the configuration leaves open.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Final, NamedTuple

from zinfer.config.settings import Batching, Settings
from zinfer.errors import ConfigError
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.job_estimator import JobEstimator, JobPrediction
from zinfer.planning.kv_budget import BatchingBudget, find_budget
from zinfer.planning.pass_sizes import REPLAYED_TOKENS, most_streamed_bytes, replayed_tokens
from zinfer.planning.placement import Plan
from zinfer.planning.plan import Case
from zinfer.planning.simulation import RankPasses, Simulations, simulated_ranks
from zinfer.scheduling.page_allocator import check_pages
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.workload import WorkSums

ROWS_TOGETHER: Final = 4096
"""Default batch size of a job, in rows. Four times the default of sequences at once, because the last rows of a batch
run in small passes."""

_CHOSEN: Final = (
    "tokens_per_pass",
    "max_sequences",
    "kv_cache_memory",
    "kv_cache_dtype",
    "kv_cache_tier",
    "admission_order",
)
"""Keys of the section `zinfer` that a plan sets, or leaves at their defaults."""
_USUAL: Final = ("auto", "device", "arrival")
_FEWEST_SIMULATED: Final = 64
_ALIKE: Final = 3  # sampled rows of similar new tokens; more make prompts, less make new tokens those of all on average
_ADMISSION_STEPS: Final = 16  # what adding and admitting a sequence takes, in steps of one


@dataclass(frozen=True)
class Job:
    """Prompt lengths and new tokens of a job.

    Attributes:
        num_rows: rows of the whole job.
        prompt_lens, new_tokens: tokens of each row in a sample of at least one.

    Raises:
        ConfigError: there are no rows, or the two are not as long as each other.
    """

    num_rows: int
    prompt_lens: Sequence[int]
    new_tokens: Sequence[int]

    def __post_init__(self) -> None:
        lengths, news = len(self.prompt_lens), len(self.new_tokens)
        if self.num_rows < 1 or not lengths or lengths != news:
            raise ConfigError(
                f"a job of {self.num_rows} rows with {lengths} prompt_lens and {news} new_tokens; give at least one "
                "row, and as many of one as of the other"
            )

    @property
    def has_equal_rows(self) -> bool:
        """Whether all rows of the sample have as many tokens."""
        return len(set(zip(self.prompt_lens, self.new_tokens, strict=True))) == 1

    @property
    def longest(self) -> tuple[int, int]:
        """Prompt length and new tokens of the longest row in the sample."""
        return max(zip(self.prompt_lens, self.new_tokens, strict=True), key=sum)

    @cached_property
    def means(self) -> tuple[float, float, float]:
        """Mean tokens of a prompt, new tokens, and pairs of a prompt's tokens, of a row in the sample."""
        return fmean(self.prompt_lens), fmean(self.new_tokens), fmean(n * (n + 1) / 2 for n in self.prompt_lens)

    def part(self, count: int) -> "Job":
        """Return the part of one group of ranks, of so many groups."""
        return replace(self, num_rows=-(-self.num_rows // count))

    def sample(self, most_steps: int, fewest: int = _FEWEST_SIMULATED, num_ranks: int = 1) -> "Sample":
        """Return rows that stand for those that share passes, as many as are simulated in so many steps.

        Rows are repeated if there are too few.

        Args:
            most_steps: of a sequence.
            fewest: rows, whatever they take.
            num_ranks: that make passes in step, each with as many rows.
        """
        num_simulated = simulated_ranks(num_ranks, list(zip(self.prompt_lens, self.new_tokens, strict=True)))
        together = min(self.num_rows, ROWS_TOGETHER)
        row_steps = fmean(self.new_tokens) + _ADMISSION_STEPS
        count = min(together, max(fewest, int(most_steps / num_simulated / row_steps)))
        ranks = []
        for rank in range(num_simulated):
            places = self._spread(count, rank, num_simulated)
            rows = [self.prompt_lens[i] for i in places], [self.new_tokens[i] for i in places]
            ranks.append(Job(self.num_rows, *rows))
        return Sample(ranks[0], together / count, int(row_steps * count * num_simulated), ranks[-1], num_ranks)

    def _spread(self, count: int, rank: int, num_ranks: int) -> list[int]:
        """Return the places of so many rows whose lengths are spread as those of all, in order; repeated if too few.

        Rows of similar new tokens are taken together, and of each such group every n-th by prompt length (stratified
        sampling). Ranks take different ones; where rows are repeated, they begin at different ones.
        """
        num_rows = len(self.prompt_lens)
        if count >= num_rows:
            first = rank * count // num_ranks
            return [(first + number) % count * num_rows // count for number in range(count)]
        by_new = sorted(range(num_rows), key=lambda i: (self.new_tokens[i], self.prompt_lens[i]))
        ordered, num_groups = [], -(-count // _ALIKE)
        for group in range(num_groups):
            alike = by_new[group * num_rows // num_groups : (group + 1) * num_rows // num_groups]
            ordered += sorted(alike, key=lambda i: self.prompt_lens[i])
        # From one row that is taken to the next each rank has a part of the rows, and takes the middle of it.
        halves, middle = 2 * num_ranks, 2 * rank + 1
        return sorted(ordered[(halves * number + middle) * num_rows // (halves * count)] for number in range(count))


class Sample(NamedTuple):
    """Rows that are simulated.

    rows: the job, with these rows.
    scale: how many rows each stands for.
    num_steps: what simulating them takes, in steps of a sequence.
    other: likewise of another rank in step; the same if all rows are alike, or there is none.
    num_ranks: that are in step.
    """

    rows: Job
    scale: float
    num_steps: int
    other: Job
    num_ranks: int

    def simulations(self, window: int | None) -> Simulations:
        """Return simulations of these rows that are about right; ``window`` as for `Simulations`."""
        rows, other = self.rows, self.other
        lengths = None if other is rows else (other.prompt_lens, other.new_tokens)
        return Simulations(
            rows.prompt_lens, rows.new_tokens, window, self.scale, lengths, self.num_ranks, is_exact=False
        )


@dataclass(frozen=True)
class JobPlan:
    """A plan for one job.

    Attributes:
        case: the planned case.
        batching: stated or chosen sizes.
        budget: memory for these sizes.
        plan: placement of the weights.
        job: the job, with the sample that was simulated.
        passes: of the sample.
        repeats: how often they are repeated for the rows that share passes, `ROWS_TOGETHER` at most.
        seconds: time for all rows.
        simulations: cached simulations of these rows.
        estimator: of its passes.
    """

    case: Case
    batching: Batching
    budget: BatchingBudget
    plan: Plan
    job: Job
    passes: RankPasses = field(repr=False)
    repeats: float
    seconds: float
    simulations: Simulations = field(repr=False, compare=False)
    estimator: JobEstimator = field(repr=False, compare=False)

    @property
    def parts(self) -> DeviceParts:
        """What takes the device's memory."""
        return parts_beside(self.case, self.budget, self.plan)

    @cached_property
    def simulated(self) -> JobPrediction:
        """Prediction for the rows that share passes; a search asks for that of few plans."""
        return self.estimator.of_simulated(self.passes).repeated(self.repeats)

    @property
    def predicted(self) -> JobPrediction:
        """Prediction for all rows, as a run of the job shows it."""
        return self.simulated.repeated(self.seconds / self.simulated.seconds)

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
        for key in ("kv_cache_dtype", "kv_cache_tier", "admission_order"):
            if (chosen := getattr(self.batching, key)) not in _USUAL:
                named[key] = chosen
        return named

    def configuration(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole configuration with this plan's keys in its section `zinfer`.

        Args:
            given: the configuration as written.
        """
        stated = given.get("zinfer")
        kept = {key: value for key, value in stated.items() if key not in _CHOSEN} if isinstance(stated, dict) else {}
        return {**given, "zinfer": {**kept, **self.keys()}}


def parts_beside(case: Case, budget: BatchingBudget, plan: Plan) -> DeviceParts:
    """Return what takes the device's memory in continuous batching."""
    return DeviceParts.of(plan, case.dequantizing(budget.footprint), case.machine.limits, case.machine.usable_bytes)


@dataclass(frozen=True)
class SizedJob:
    """A job with all its sizes, before its passes are simulated.

    Attributes:
        case, batching, budget, plan: as in `JobPlan`.
        estimator: predicts passes.
    """

    case: Case
    batching: Batching
    budget: BatchingBudget
    plan: Plan
    estimator: JobEstimator

    @classmethod
    def of(cls, case: Case, batching: Batching, job: Job, window: int | None) -> "SizedJob":
        """Place the weights beside the cache and the activations. Raises PlanError if they do not fit."""
        outline, machine, settings = case.outline, case.machine, replace(case.settings, batching=batching)
        free_bytes, most = machine.device_memory_bytes, sum(job.longest)
        budget = find_budget(outline.spec, outline.dtype, case.weights, settings, machine.limits, free_bytes, most)
        if case.mesh.num_in_step > 1:  # as such ranks agree
            budget = replace(budget, num_sets=case.mesh.pipeline, lends=False)
        plan = case.place(case.limits_beside(case.dequantizing(budget.footprint)))
        clock = case.clock(plan, is_fused=bool(settings.for_batches(on_cuda=machine.limits.on_cuda).kernel_inject))
        token_bytes = outline.spec.kv.token_bytes(budget.kv_dtype)
        if settings.offload.nvme_path is not None and clock.disk_spares_time(token_bytes):
            budget = replace(budget, swaps_to_disk=True)
        latency_s = batching.max_token_latency_s
        estimator = JobEstimator(
            budget,
            window,
            token_bytes,
            clock.pass_time,
            latency_s,
            clock.num_gathering,
            replayed=_replayed_sizes(case, settings, budget, plan),
        )
        return cls(case, batching, budget, plan, estimator)

    @property
    def parts(self) -> DeviceParts:
        """What takes the device's memory."""
        return parts_beside(self.case, self.budget, self.plan)

    def check_longest(self, job: Job) -> None:
        """Raise PlanError if the cache does not hold the longest row."""
        check_pages(*job.longest, self.budget.num_pages, self.budget.page_size, self.estimator.window)

    @property
    def _least_pass_s(self) -> float:
        """Seconds below which no pass is: one token, while weights stay in all pages that may be lent."""
        num_lent = self.budget.num_pages if self.budget.lends else 0
        return self.estimator.time_of(PassSize(1, 1, 2, num_lent)).seconds

    def estimate_s(self, job: Job) -> float:
        """Return about what `simulate` would, by sums over the rows: for comparing sizes.

        As many rows run together as the cache holds on average. Their passes are of two kinds, those with prompts, each
        with as many tokens as the scheduler's pace, and those of decodes alone. All that can be replayed are.
        """
        budget, num_rows = self.budget, min(job.num_rows, ROWS_TOGETHER)
        prompt, new, pairs = job.means
        row_pages = (prompt + new / 2) / budget.page_size + 0.5  # its last page is half full
        sums = WorkSums(num_rows, math.ceil(num_rows * row_pages), round(num_rows * prompt), round(num_rows * new))
        together = max(sums.num_together(budget.num_pages, min(budget.max_sequences, budget.tokens_per_pass)), 1)
        tokens = min(self.estimator.most_tokens, sums.pace(budget.num_pages, budget.max_sequences))
        longest = max(job.new_tokens)
        # The last rows decode alone, unless these are the shortest.
        last = longest / 2 if budget.order == "arrival" and together < num_rows else 0
        num_passes = max((sums.num_prompt + sums.num_new) / tokens, sums.num_new / together + last, longest)
        decodes = sums.num_new / num_passes
        with_prompts = min(sums.num_prompt / max(tokens - decodes, 1), num_passes)
        seconds = 0.0
        for count, prompts in ((with_prompts, sums.num_prompt / with_prompts), (num_passes - with_prompts, 0.0)):
            context = round(decodes * (prompt + new / 2) + prompts / 2)
            size = PassSize(
                round(decodes + prompts) or 1, round(decodes) or 1, context, num_pairs=round(pairs * prompts / prompt)
            )
            seconds += count * self.estimator.time_of(size).seconds
        return seconds * job.num_rows / num_rows

    def simulate(self, job: Job, simulations: Simulations, most_s: float = math.inf) -> JobPlan:
        """Return the plan with the predicted seconds of a sample's passes.

        Raises:
            PlanError: a sequence does not fit the cache even alone; or the job certainly takes more than ``most_s``.
        """
        estimator, num_batches = self.estimator, job.num_rows / min(job.num_rows, ROWS_TOGETHER)
        repeats = simulations.repeats(self.budget)
        most_passes = most_s / num_batches / repeats / self._least_pass_s
        passes = simulations.under(self.budget, estimator.order, most_passes)
        seconds = estimator.seconds_of(passes) * repeats * num_batches
        case, batching, budget, plan = self.case, self.batching, self.budget, self.plan
        return JobPlan(case, batching, budget, plan, job, passes, repeats, seconds, simulations, estimator)


def _replayed_sizes(case: Case, settings: Settings, budget: BatchingBudget, plan: Plan) -> tuple[int, ...] | None:
    """Return the tokens of passes with prompts that an `LLM` captures and replays; None: it replays nothing."""
    if not case.machine.limits.on_cuda or settings.cuda_graph is False or settings.check_finite or budget.is_hosted:
        return None
    if settings.cuda_graph is None and plan.streamed_bytes > most_streamed_bytes(len(plan.homes)):
        return None
    largest = max((each.block.layout.numel for each in case.outline.blocks if each.is_layer), default=1)
    return tuple(size for size in REPLAYED_TOKENS if size <= replayed_tokens(largest))


def plan_sizes(case: Case, batching: Batching, job: Job, simulations: Simulations) -> JobPlan:
    """Plan a job with the sizes in ``batching``. Raises PlanError if it does not fit."""
    return SizedJob.of(case, batching, job, simulations.window).simulate(job, simulations)
