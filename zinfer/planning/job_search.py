"""Find the sizes of a job that its configuration leaves open: the fastest of those that fit. Pure.

[Note: how it is searched]
The forms of the KV cache, its memory and its dtype, are few, and each is searched by itself. In a form there are four
sizes, bytes of the cache, sequences at once, tokens a pass and the order of admission: points of a cube
(`zinfer.planning.size_space`). Points spread evenly over it are estimated, and the best of them simulated with few
rows; then points near the best of these, and the best of those with more rows, with points ever nearer to the best.
Each stage leaves out the forms that fell behind. The best few plans are simulated once more with more rows: a small
sample tells little of the longest ones, with which a job ends, and in an n-th of the cache other numbers of rows may
fit than in all of it. A plan takes about a second: where simulations are long, fewer points are tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal

from zinfer.planning.device_cap import naming_least_cap
from zinfer.planning.job_plan import Job, JobPlan, Sample, SizedJob
from zinfer.planning.plan import Case
from zinfer.planning.simulation import Simulations
from zinfer.planning.size_search import LONG_S, SizeSearch
from zinfer.planning.size_space import SizeSpace
from zinfer.planning.trials import Trials
from zinfer.probe.limits import MachineLimits

_FEW_STEPS: Final = 3_000  # of a simulation with few rows
_FEW_ROWS: Final = 32
_SAMPLE_STEPS: Final = 12_000
_ROUGH_SAMPLE_STEPS: Final = 6_000
_FINAL_STEPS: Final = 40_000
_NUM_FINAL: Final = 5
_LONG_STEPS: Final = 80_000
_NUM_LONG: Final = 3
_LEAST_GAIN: Final = 1.02  # for which a cache in host memory, or in another dtype, is chosen
# Times the seconds of the best form: others are not searched further, after each stage.
_MOST_BEHIND_ESTIMATED: Final = 1.5
_MOST_BEHIND_WIDE: Final = 1.3
_MOST_BEHIND_NEAR: Final = 1.15
_MOST_BEHIND: Final = 1.06
_NUM_FORMS: Final = 2  # that are searched further with more rows


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
    for prompt_len, new_tokens in zip(job.prompt_lens, job.new_tokens, strict=True):
        case.check_length(prompt_len, 0 if new_tokens == 1 else new_tokens)  # a prompt that is scored has one, too
    window = case.outline.spec.common_window
    num_ranks, most_steps = case.mesh.zero, _ROUGH_SAMPLE_STEPS if is_rough else _SAMPLE_STEPS
    samples = job.sample(_FEW_STEPS, _FEW_ROWS, num_ranks), job.sample(most_steps, num_ranks=num_ranks)
    few, more = ((each, each.simulations(window)) for each in samples)
    forms = list(_forms(case))
    searches = [
        SizeSearch(SizeSpace(form, job), Trials(form, *few), Trials(form, *more), is_rough=is_rough) for form in forms
    ]
    for look, most_behind in (
        (SizeSearch.estimate, _MOST_BEHIND_ESTIMATED),
        (SizeSearch.look_wide, _MOST_BEHIND_WIDE),
        (SizeSearch.look_near, _MOST_BEHIND_NEAR),
        (SizeSearch.look_close, _MOST_BEHIND),
    ):
        for search in searches:
            look(search)
        least_s = min(search.best_s for search in searches)
        searches = [search for search in searches if search.best_s <= least_s * most_behind]
    found: list[tuple[JobPlan, SizeSearch]] = []
    for search in sorted(searches, key=lambda search: search.best_s)[:_NUM_FORMS]:
        planned = search.fastest()
        found += [] if planned is None else [(planned, search)]
    if not found:
        return [_usual(forms[0], *more)]
    best, search = min(found, key=lambda pair: _rank(pair[0]))
    plans = sorted([*(planned for planned, _ in found), *search.with_other_passes(best)], key=_rank)
    if is_rough or (job.has_equal_rows and best.seconds < LONG_S):
        return plans
    tried = sorted((planned for _, search in found for planned in search.plans), key=_rank)
    return _with_more_rows(job, [*plans, *tried], window)


def _with_more_rows(job: Job, plans: Sequence[JobPlan], window: int | None) -> list[JobPlan]:
    """Return the first few different plans, simulated with more rows, and the best of a long job with still more."""
    different = list({planned.batching: planned for planned in plans}.values())[:_NUM_FINAL]
    found = _simulated(job, different, window, _FINAL_STEPS) or list(plans)
    if found[0].seconds > LONG_S:
        found = [*_simulated(job, found[:_NUM_LONG], window, _LONG_STEPS), *found[_NUM_LONG:]] or found
    return found


def _simulated(job: Job, plans: Sequence[JobPlan], window: int | None, most_steps: int) -> list[JobPlan]:
    """Return the plans with other samples, the fastest first, without those that are clearly slower."""
    sample = job.sample(most_steps, num_ranks=plans[0].case.mesh.zero)
    simulations = sample.simulations(window)
    found = [Trials(each.case, sample, simulations).find(each.batching) for each in plans]
    return sorted((each for each in found if each is not None), key=_rank)


def _usual(case: Case, sample: Sample, simulations: Simulations) -> JobPlan:
    """Return the plan with the usual sizes, for want of better ones.

    Raises:
        PlanError: they do not fit, or the cache does not hold the longest row; with the least cap that is enough.
    """

    def sized(limits: MachineLimits) -> SizedJob:
        within = case.within(limits)
        found = SizedJob.of(within, within.settings.batching, sample.rows, simulations.window)
        found.check_longest(sample.rows)
        return found

    limits = case.machine.limits
    with naming_least_cap(limits, case.machine.device_memory_bytes, lambda limits: sized(limits).parts):
        return sized(limits).simulate(sample.rows, simulations)


def _rank(planned: JobPlan) -> float:
    """Return the seconds of a plan, more for a cache in host memory or in a smaller dtype.

    They have costs that are not predicted: passes that are not captured, and some accuracy.
    """
    costs = planned.budget.is_hosted + (planned.batching.kv_cache_dtype != "auto")
    return planned.seconds * _LEAST_GAIN**costs


def open_tiers(case: Case) -> list[Literal["device", "host"]]:
    """Return the memories of the KV cache that the settings leave open; stated bytes of it are meant for the device."""
    stated = case.settings.batching
    is_open = stated.kv_cache_tier == "auto" and stated.kv_cache_memory is None
    if is_open and case.machine.limits.on_cuda and case.settings.offload.pin_memory:
        return ["device", "host"]
    return ["host" if stated.kv_cache_tier == "host" else "device"]


def _forms(case: Case) -> Iterator[Case]:
    """Yield the case with each form of the KV cache that the settings leave open.

    The cache's dtype changes numbers, so it is chosen only where speed was asked for.
    """
    stated = case.settings.batching
    dtypes = [stated.kv_cache_dtype]
    if stated.kv_cache_dtype == "auto" and case.settings.optimize == "speed":
        dtypes.append("int8")
    for tier in open_tiers(case):
        for dtype in dtypes:
            yield case.with_batching(replace(stated, kv_cache_tier=tier, kv_cache_dtype=dtype))
