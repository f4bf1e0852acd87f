"""Find the sizes of a job that its configuration leaves open: the fastest of those that fit. Pure.

[Note: how it is searched]
The forms of the KV cache, its memory and its dtype, are few, and each is searched by itself. In a form there are four
sizes: tokens a pass, bytes of the cache, sequences at once, and the order of admission. Each size is improved over its
whole list while the others stay, until none gets faster: by the rough estimate of equal passes, which takes no
simulation, from several starts. The few best of that are simulated, and the best of these is improved once more in the
same way, and then in smaller steps, by as many simulations as are quick.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from zinfer.config.settings import Batching
from zinfer.errors import PlanError
from zinfer.planning.device_cap import naming_least_cap
from zinfer.planning.job_plan import Job, JobPlan, SizedJob
from zinfer.planning.kv_budget import HostShare
from zinfer.planning.plan import Case
from zinfer.planning.simulation import Simulations
from zinfer.probe.limits import MachineLimits

_TOKENS_PER_PASS: Final = (512, 1024, 2048, 4096, 8192, 12_288, 16_384, 32_768, 131_072)
_KV_SHARES: Final = (0.02, *(number / 20 for number in range(1, 19)))  # of device memory; the rest is for weights
_MAX_SEQUENCES: Final = (64, 128, 256, 512, 1024)
_HOSTED_KV_SHARES: Final = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0)  # of the usual size
_HOSTED_MAX_SEQUENCES: Final = (256, 512, 1024, 4096)
_SAMPLE_STEPS: Final = 12_000  # of a simulation: about 30 ms
_ROUGH_SAMPLE_STEPS: Final = 6_000
_SIMULATED_STEPS: Final = 360_000  # of all simulations in a form
_ROUGHLY_SIMULATED_STEPS: Final = 40_000
_FINE_STEPS: Final = (0.8, 1.2, 0.6, 1.5)
_NUM_FIRST: Final = 5  # plans that are simulated for their estimates
_MOST_ROUNDS: Final = 4
_LEAST_GAIN: Final = 1.02  # for which a cache in host memory, or in another dtype, is chosen
_MOST_FALLEN_BEHIND: Final = 1.5  # times the seconds of the best: no form so far behind by its estimate is simulated


def plan_job(case: Case, job: Job, *, is_rough: bool = False) -> JobPlan:
    """Return the fastest plan of a job, in any form of the KV cache that the settings leave open.

    Args:
        case: the model, the machine and the settings.
        job: the job.
        is_rough: simulate fewer rows, which takes less time and is for comparing cases.

    Raises:
        PlanError: nothing fits, not even the smallest sizes.
        ConfigError: a row is longer than the model or the configuration allows.
    """
    return plan_forms(case, job, is_rough=is_rough)[0]


def plan_forms(case: Case, job: Job, *, is_rough: bool = False) -> list[JobPlan]:
    """Return the fastest plan in each form of the KV cache that fits, the fastest first; as `plan_job`.

    Of the fastest form there is also the best plan with other tokens a pass, if any was tried.
    """
    case.check_length(*job.longest)
    sample = job.sample(_ROUGH_SAMPLE_STEPS if is_rough else _SAMPLE_STEPS)
    rows, window = sample.rows, case.outline.spec.common_window
    simulations = Simulations(rows.prompt_lens, rows.new_tokens, window, sample.scale)
    most = (_ROUGHLY_SIMULATED_STEPS if is_rough else _SIMULATED_STEPS) // sample.num_steps
    searches = [_Search(each, rows, simulations, max(most, _NUM_FIRST)) for each in _forms(case)]
    fitting = [each for each in searches if each.best_s < math.inf]
    if not fitting:
        machine, search = case.machine, searches[0]
        with naming_least_cap(machine.limits, machine.device_memory_bytes, lambda limits: search.usual(limits).parts):
            return [search.usual(machine.limits).simulate(rows, simulations)]
    least_s = min(each.best_s for each in fitting)
    found = [(each.fastest(), each) for each in fitting if each.best_s <= least_s * _MOST_FALLEN_BEHIND]
    best, search = min(found, key=lambda pair: _rank(pair[0]))
    return sorted([*(planned for planned, _ in found), *search.with_other_passes(best)], key=_rank)


def _rank(planned: JobPlan) -> float:
    """Return the seconds of a plan, more for a cache in host memory or in a smaller dtype.

    They have costs that are not predicted: passes that are not captured, and some accuracy.
    """
    costs = planned.budget.is_hosted + (planned.batching.kv_cache_dtype != "auto")
    return planned.seconds * _LEAST_GAIN**costs


def _forms(case: Case) -> Iterator[Case]:
    """Yield the case with each form of the KV cache that the settings leave open.

    Stated bytes of the cache are meant for the device. The cache's dtype changes numbers, so it is chosen only where
    speed was asked for.
    """
    stated, limits = case.settings.batching, case.machine.limits
    tiers: list[Literal["device", "host"]] = ["host" if stated.kv_cache_tier == "host" else "device"]
    is_open = stated.kv_cache_tier == "auto" and stated.kv_cache_memory is None
    if is_open and limits.on_cuda and case.settings.offload.pin_memory:
        tiers = ["device", "host"]
    dtypes = [stated.kv_cache_dtype]
    if stated.kv_cache_dtype == "auto" and case.settings.optimize == "speed":
        dtypes.append("int8")
    for tier in tiers:
        for dtype in dtypes:
            batching = replace(stated, kv_cache_tier=tier, kv_cache_dtype=dtype)
            yield replace(case, settings=replace(case.settings, batching=batching))


def _nearest(values: Sequence[Any], batching: Batching, name: str) -> list[Any]:
    """Return the values of a size, those next to its present one first."""
    place = values.index(getattr(batching, name))
    return sorted(values, key=lambda value: abs(values.index(value) - place))


class _Search:
    """The search in one form of the KV cache.

    Args:
        case: with that form stated.
        job: the sample.
        simulations: of it.
        most_simulated: plans of this form.

    ``best_s``: the estimated seconds of the best sizes; infinite: nothing fits.
    """

    def __init__(self, case: Case, job: Job, simulations: Simulations, most_simulated: int) -> None:
        self._case, self._job, self._simulations = case, job, simulations
        self._num_left, self._least_s = most_simulated, math.inf
        self._sized: dict[Batching, tuple[float, SizedJob | PlanError]] = {}
        self._simulated: dict[Batching, JobPlan | PlanError] = {}
        self._choices = self._find_choices()
        for start in self._starts():
            self._improve(start, self._estimated)
        self.best_s = min(seconds for seconds, _ in self._sized.values())

    def usual(self, limits: MachineLimits) -> SizedJob:
        """Return the job within other budgets, in this form and else with the usual sizes, for want of better ones.

        Raises:
            PlanError: they do not fit, or the cache does not hold the longest row.
        """
        case = self._case.within(limits)
        sized = SizedJob.of(case, case.settings.batching, self._job, self._simulations.window)
        sized.check_longest(self._job)
        return sized

    def fastest(self) -> JobPlan:
        """Return the fastest plan, of those that fit by the estimate."""
        best = sorted(self._sized, key=lambda batching: self._sized[batching][0])[:_NUM_FIRST]
        chosen = self._improve(min(best, key=self._predicted), self._predicted)
        for _ in range(_MOST_ROUNDS):
            before, chosen = chosen, self._refine(chosen)
            if chosen == before:
                break
        found = self._simulated[chosen]
        if isinstance(found, PlanError):
            raise found
        return found

    def with_other_passes(self, best: JobPlan) -> list[JobPlan]:
        """Return the best plan with other tokens a pass, if any was simulated."""
        plans = (each for each in self._simulated.values() if isinstance(each, JobPlan))
        others = [each for each in plans if each.batching.tokens_per_pass != best.batching.tokens_per_pass]
        return sorted(others, key=lambda planned: planned.seconds)[:1]

    def _find_choices(self) -> dict[str, Sequence[Any]]:
        """Return the values of each size to try, ascending: the stated one alone, if there is one."""
        case, stated = self._case, self._case.settings.batching
        device_bytes = case.machine.usable_bytes
        shares = [int(device_bytes * share) for share in _KV_SHARES]
        counts: Sequence[int] = _MAX_SEQUENCES
        if stated.kv_cache_tier == "host":
            host = HostShare.find(case.outline.blocks, case.settings, case.machine.limits)
            usual_bytes = host.pages_bytes(case.outline.spec.kv, device_bytes)
            shares = sorted({min(int(usual_bytes * share), host.usual_bytes) for share in _HOSTED_KV_SHARES})
            counts = _HOSTED_MAX_SEQUENCES
        orders: Sequence[str] = [stated.admission_order]
        if stated.admission_order == "auto":
            orders = ["arrival"] if self._job.has_equal_rows else ["arrival", "longest_first"]
        sizes = _TOKENS_PER_PASS
        return {
            "tokens_per_pass": sizes if stated.tokens_per_pass is None else [stated.tokens_per_pass],
            "kv_cache_memory": shares if stated.kv_cache_memory is None else [stated.kv_cache_memory],
            "max_sequences": counts if stated.max_sequences is None else [stated.max_sequences],
            "admission_order": orders,
        }

    def _starts(self) -> Iterator[Batching]:
        """Yield middling sizes with little and with much cache, and with few tokens."""
        sizes, shares, counts, orders = self._choices.values()
        middle = len(sizes) // 2
        for size, nbytes in ((sizes[middle], shares[0]), (sizes[middle], shares[-1]), (sizes[0], shares[-1])):
            yield replace(
                self._case.settings.batching,
                tokens_per_pass=size,
                kv_cache_memory=nbytes,
                max_sequences=counts[len(counts) // 2],
                admission_order=orders[0],
            )

    def _improve(self, batching: Batching, seconds_of: Callable[[Batching], float]) -> Batching:
        """Return sizes that no other value of a single one makes faster."""
        for _ in range(_MOST_ROUNDS):
            before = batching
            for name, values in self._choices.items():
                nearest = sorted(
                    values, key=lambda value: abs(values.index(value) - values.index(getattr(before, name)))
                )
                several = [batching, *(replace(batching, **{name: each}) for each in nearest)]
                batching = min(several, key=seconds_of)
            if batching == before:
                break
        return batching

    def _refine(self, batching: Batching) -> Batching:
        """Return sizes a little above or below these, where the simulation finds them faster."""
        for name, values in self._choices.items():
            if len(values) > 1 and name != "admission_order":
                size = getattr(batching, name)
                tried = (min(max(int(size * factor), 1), values[-1]) for factor in _FINE_STEPS)
                several = [batching, *(replace(batching, **{name: each}) for each in tried)]
                batching = min(several, key=self._predicted)
        return batching

    def _estimated(self, batching: Batching) -> float:
        if batching not in self._sized:
            try:
                sized = SizedJob.of(self._case, batching, self._job, self._simulations.window)
                self._sized[batching] = sized.estimate(self._job), sized
            except PlanError as failure:
                self._sized[batching] = math.inf, failure
        return self._sized[batching][0]

    def _predicted(self, batching: Batching) -> float:
        if batching not in self._simulated:
            if not self._num_left:
                return math.inf
            self._num_left -= 1
            self._estimated(batching)
            sized = self._sized[batching][1]
            try:
                if isinstance(sized, PlanError):
                    raise sized
                self._simulated[batching] = found = sized.simulate(self._job, self._simulations, self._least_s)
                self._least_s = min(self._least_s, found.seconds)
            except PlanError as failure:
                self._simulated[batching] = failure
        result = self._simulated[batching]
        return math.inf if isinstance(result, PlanError) else result.seconds
