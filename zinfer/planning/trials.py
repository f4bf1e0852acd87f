"""`Trials`: plans of a job with different sizes, simulated on one sample of its rows. Pure.

[Note: what is not simulated]
A simulation takes ten times as long as an estimate from the job's sums (`SizedJob.estimate_s`). Estimates are up to
half the simulated seconds, but alike in it: what is fastest in simulation is among the few that are estimated best. So
sizes that are estimated clearly slower than the fastest simulated ones are not simulated. Of short jobs all are: there
the passes that are launched until their form is captured decide, and estimates know nothing of them.
"""

import math
from typing import Final

from zinfer.config.settings import Batching
from zinfer.errors import PlanError
from zinfer.planning.job_plan import JobPlan, Sample, SizedJob
from zinfer.planning.plan import Case
from zinfer.planning.simulation import Simulations

_RUN_STEPS: Final = 15  # what a run of passes takes, in steps of one of its sequences
_MOST_BEHIND: Final = 1.2  # times the estimate of the fastest simulated sizes: others are not simulated
SHORT_S: Final = 20.0
"""Estimated seconds of jobs in which captures count."""


class Trials:
    """Simulates a job with different sizes, and keeps the plans.

    Args:
        case: the case; its own sizes do not count.
        sample: rows of the job.
        simulations: of them.

    ``num_steps``: what was simulated so far, in steps of a sequence.
    """

    def __init__(self, case: Case, sample: Sample, simulations: Simulations) -> None:
        self._case, self._sample, self._simulations = case, sample, simulations
        self._found: dict[Batching, JobPlan | None] = {}
        self._sized: dict[Batching, SizedJob | None] = {}
        self._least_s = self._estimated_s = math.inf  # of the fastest so far
        self.num_steps = 0

    @property
    def plans(self) -> list[JobPlan]:
        """All plans that fit and are not clearly slower than one before."""
        return [each for each in self._found.values() if each is not None]

    def find(self, batching: Batching) -> JobPlan | None:
        """Return the plan with these sizes; None if it does not fit, or is clearly slower than one before."""
        if batching not in self._found:
            self._found[batching] = self._simulate(batching)
        return self._found[batching]

    def seconds(self, batching: Batching) -> float:
        """Return the predicted seconds of that plan; infinite if there is none."""
        planned = self.find(batching)
        return math.inf if planned is None else planned.seconds

    def estimate(self, batching: Batching) -> float:
        """Return the seconds with these sizes by sums over the job; infinite if they do not fit."""
        if batching not in self._sized:
            self._sized[batching] = self._size(batching)
        sized = self._sized[batching]
        return math.inf if sized is None else sized.estimate_s(self._sample.rows)

    def _size(self, batching: Batching) -> SizedJob | None:
        try:
            sized = SizedJob.of(self._case, batching, self._sample.rows, self._simulations.window)
            sized.check_longest(self._sample.rows)
        except PlanError:
            return None
        return sized

    def _simulate(self, batching: Batching) -> JobPlan | None:
        estimated_s, sized = self.estimate(batching), self._sized[batching]
        if sized is None or SHORT_S < self._estimated_s * _MOST_BEHIND < estimated_s:
            return None
        simulations, num_before = self._simulations, self._simulations.num_runs
        try:
            planned = sized.simulate(self._sample.rows, simulations, self._least_s)
        except PlanError:
            return None
        finally:
            if num_runs := simulations.num_runs - num_before:
                self.num_steps += self._sample.num_steps + num_runs * _RUN_STEPS
        if planned.seconds < self._least_s:
            self._least_s, self._estimated_s = planned.seconds, estimated_s
        return planned
