"""`Trials`: plans of a job with different sizes, simulated on one sample of its rows. Pure."""

import math
from typing import Final

from zinfer.config.settings import Batching
from zinfer.errors import PlanError
from zinfer.planning.job_plan import JobPlan, Sample, SizedJob
from zinfer.planning.plan import Case
from zinfer.planning.simulation import Simulations

_RUN_STEPS: Final = 15  # what a run of passes takes, in steps of one of its sequences


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
        self._least_s = math.inf
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

    def _simulate(self, batching: Batching) -> JobPlan | None:
        rows, simulations, num_before = self._sample.rows, self._simulations, self._simulations.num_runs
        try:
            sized = SizedJob.of(self._case, batching, rows, simulations.window)
            planned = sized.simulate(rows, simulations, self._least_s)
        except PlanError:
            return None
        finally:
            if num_runs := simulations.num_runs - num_before:
                self.num_steps += self._sample.num_steps + num_runs * _RUN_STEPS
        self._least_s = min(self._least_s, planned.seconds)
        return planned
