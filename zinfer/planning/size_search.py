"""`SizeSearch`: finds the fastest sizes of a job in one form of the KV cache, by estimates and simulations. Pure."""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from zinfer.planning.job_plan import JobPlan
from zinfer.planning.size_space import (
    CORNER,
    FEW_SEQUENCES,
    SMALL_PASSES,
    Point,
    SizeSpace,
    in_other_order,
    near,
    spread,
    with_other_caches,
)
from zinfer.planning.trials import SHORT_S, Trials

LONG_S: Final = 120.0
"""Seconds of jobs for which a plan may take a few seconds more."""
_NUM_SPREAD: Final = 48
_NUM_ROUGHLY_SPREAD: Final = 16
_NUM_SIMULATED: Final = 8  # of those, the ones that are estimated best; of short jobs all
_NUM_KEPT: Final = 3
_NUM_ROUGH: Final = 8  # points tried around each of them, or half as many if they take long
_ROUGH_STEPS: Final = 50_000
_NUM_FINE: Final = 24
_FINE_STEPS: Final = 250_000
_ROUGHLY_FINE_STEPS: Final = 40_000
_NUM_HALVINGS: Final = 4
_WIDTH: Final = 0.3
_WIDER: Final = 1.4  # after a faster point
_NARROWER: Final = 0.85  # after one that is not


class SizeSearch:
    """The search in one form of the KV cache: wide by estimates, near the best with few rows, at last with more rows.

    Args:
        space: the sizes.
        few: trials with few rows.
        more: trials with more rows; their plans are returned.
        is_rough: try fewer points.

    ``best_s``: the seconds of the best point, estimated or with few rows; infinite: nothing fits.
    """

    def __init__(self, space: SizeSpace, few: Trials, more: Trials, *, is_rough: bool) -> None:
        self._space, self._few, self._more = space, few, more
        self._num_spread = _NUM_ROUGHLY_SPREAD if is_rough else _NUM_SPREAD
        self._fine_steps = _ROUGHLY_FINE_STEPS if is_rough else _FINE_STEPS
        self._kept: list[Point] = []
        self.best_s = math.inf

    def estimate(self) -> None:
        """Estimate points of the whole space, evenly spread."""
        points = (CORNER, FEW_SEQUENCES, SMALL_PASSES, *spread(self._num_spread))
        estimates = {point: self._few.estimate(self._space.sizes(point)) for point in points}
        self._kept = sorted(points, key=estimates.__getitem__)
        self.best_s = estimates[self._kept[0]]
        if self.best_s > SHORT_S:
            self._kept = self._kept[:_NUM_SIMULATED]

    def look_wide(self) -> None:
        """Try the points that are estimated best."""
        self._keep(self._kept)

    def look_near(self) -> None:
        """Try points near the best ones."""
        self._keep([self._improved(point, self._few, _NUM_ROUGH, _ROUGH_STEPS) for point in self._kept])

    def look_close(self) -> None:
        """Simulate the best points with more rows, in either order of admission."""
        starts = [each for point in self._kept for each in (point, in_other_order(point))]
        self._close = self._best(starts, self._more)
        self.best_s = self._seconds(self._close, self._more)

    def fastest(self) -> JobPlan | None:
        """Return the fastest plan near the best point; None: no point fits with more rows."""
        if self.best_s == math.inf:
            return None
        near_best = self._improved(self._close, self._more, _NUM_FINE, self._fine_steps)
        is_long = self._seconds(near_best, self._more) > LONG_S
        # Where all rows are computed in a few turns, a little less cache may be worse, and less still better again.
        points = [near_best, *with_other_caches(near_best), *(self._far(near_best) if is_long else ())]
        best = self._filled(self._best(points, self._more), self._more)
        if is_long and best != near_best:
            best = self._improved(best, self._more, _NUM_FINE, self._fine_steps // 2)
            best = self._best([best, in_other_order(best)], self._more)
        return self._more.find(self._space.sizes(best))

    @property
    def plans(self) -> list[JobPlan]:
        """The plans that were simulated with more rows."""
        return self._more.plans

    def with_other_passes(self, best: JobPlan) -> list[JobPlan]:
        """Return the best plan with other tokens a pass, if any was tried."""
        size = best.batching.tokens_per_pass
        others = [each for each in self._more.plans if each.batching.tokens_per_pass != size]
        return sorted(others, key=lambda planned: planned.seconds)[:1]

    def _keep(self, points: Iterable[Point]) -> None:
        """Keep the best points, of those with the same sizes one."""
        by_sizes = {self._space.sizes(point): point for point in points}
        ordered = sorted(by_sizes.values(), key=lambda point: self._seconds(point, self._few))
        self._kept, self.best_s = ordered[:_NUM_KEPT], self._seconds(ordered[0], self._few)

    def _improved(self, point: Point, trials: Trials, count: int, most_steps: int) -> Point:
        """Return a point that is as fast or faster: look around it, then around each faster one, ever nearer."""
        width, most_steps = _WIDTH, trials.num_steps + most_steps
        for number in range(count):
            if number >= count // 2 and trials.num_steps > most_steps:
                break
            other = near(point, number, width)
            if self._seconds(other, trials) < self._seconds(point, trials):
                point, width = other, width * _WIDER
            else:
                width *= _NARROWER
        return point

    def _far(self, point: Point) -> Iterator[Point]:
        """Yield points that steps near one do not reach.

        No more sequences than run together at most, in either order of admission, with as many tokens a pass or fewer
        in proportion, leave more memory for the cache: that of the logits.
        """
        yield in_other_order(point)
        planned = self._more.find(self._space.sizes(point))
        if planned is not None:
            few = self._space.with_sequences(point, planned.simulated.most_together)
            yield from (in_other_order(few), (point[0], few[1], *point[2:]))
            yield from (few, *(other for other in with_other_caches(few) if other[0] > few[0]))

    def _filled(self, point: Point, trials: Trials) -> Point:
        """Return the point with the largest cache that still leaves all weights on the device, if they are there.

        The best cache ends at that cliff, and steps of all sizes stop short of it.
        """
        planned, most = trials.find(self._space.sizes(point)), 1.0
        if planned is None or planned.plan.streamed_bytes:
            return point
        for _ in range(_NUM_HALVINGS):
            other = ((point[0] + most) / 2, *point[1:])
            if self._seconds(other, trials) < self._seconds(point, trials):
                point = other
            else:
                most = other[0]
        return point

    def _best(self, points: Iterable[Point], trials: Trials) -> Point:
        return min(points, key=lambda point: self._seconds(point, trials))

    def _seconds(self, point: Point, trials: Trials) -> float:
        return trials.seconds(self._space.sizes(point))
