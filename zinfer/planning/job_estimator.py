"""`JobEstimator`: predicts the time of a job's passes, simulated or computed ones."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.pass_sizes import FEWEST_REPLAYED_ROWS, PATIENCE, padded_rows, padded_segments
from zinfer.planning.simulation import PassRun, RankPasses, Simulations, simulate_runs, simulated_ranks
from zinfer.planning.step_time import PassTime, largest, resource_name, speed
from zinfer.scheduling.latency_target import LatencyTarget
from zinfer.scheduling.pass_order import PassOrder
from zinfer.scheduling.schedule import PassSize
from zinfer.units import duration

_TWO_SIZES: Final = (1024, 2048)
"""Tokens of two passes whose difference is matrix work alone."""
_NEVER: Final = -(1 << 40)
_BACKGROUND_PASSES: Final = 8
"""A pass of the background alone has the tokens of so many usual ones; whoever comes meanwhile waits for it once."""


@dataclass(frozen=True)
class JobPrediction:
    """Predicted time of a job.

    Attributes:
        seconds: total of all passes.
        num_passes: number of passes.
        tokens_per_pass: average number of tokens computed per pass.
        tokens_per_s: new tokens per second.
        bottleneck: the resource that limits most passes.
        most_together: maximum number of sequences that one pass gave a token.
        busy_s: seconds of work of each resource in all passes, by the names of `PassTime.terms`.
    """

    seconds: float
    num_passes: int
    tokens_per_pass: float
    tokens_per_s: float
    bottleneck: str
    most_together: int
    busy_s: Mapping[str, float]

    def repeated(self, times: float) -> "JobPrediction":
        """Return the prediction of as many passes again and again."""
        if times == 1:
            return self
        busy_s = {name: seconds * times for name, seconds in self.busy_s.items()}
        num_passes = round(self.num_passes * times)
        return replace(self, seconds=self.seconds * times, num_passes=num_passes, busy_s=busy_s)

    def __str__(self) -> str:
        return (
            f"{duration(self.seconds)} for {self.num_passes:,} passes of {self.tokens_per_pass:,.0f} tokens "
            f"({self.bottleneck}), {speed(self.tokens_per_s)}"
        )


@functools.lru_cache(maxsize=1 << 16)  # a search for sizes asks for the same passes again and again
def _form(num_tokens: int, num_samples: int, replayed: tuple[int, ...]) -> Hashable:
    """Return the form of passes as `JobEstimator.form_of`."""
    most, num_rows = max((FEWEST_REPLAYED_ROWS, *replayed)), padded_rows(num_samples)
    if num_tokens == num_samples:
        return (num_rows, num_rows, False) if num_rows <= most else None
    padded = next((each for each in replayed if num_tokens <= each), None)
    return None if padded is None or num_rows > most else (padded, padded_segments(num_samples), True)


def _sizes_of(runs: Sequence[PassRun], scale: float) -> Any:
    """Return an array of the sizes of runs' first passes, and how many pairs more the next has, times ``scale``."""
    import numpy as np

    sizes = np.array([(*run.first, run.num_more_pairs) for run in runs])
    return sizes if scale == 1 else np.rint(scale * sizes).astype(np.int64)


@dataclass(frozen=True)
class JobEstimator:
    """Predicts the time of passes, simulated or computed ones.

    Attributes:
        budget: budget of pages and tokens.
        window: largest attention window of all layers; None if a layer attends to all tokens.
        token_bytes: KV-cache bytes of one token in all layers.
        pass_time: `PassClock.pass_time`.
        latency_s: most seconds between two tokens of a sequence; None: passes are as large as the budget allows.
        num_ranks: that make passes in step, each with rows of its own.
        usual_tokens: most of a pass where there is no ``latency_s``; None: as many as the budget allows.
        padded_sizes: tokens that passes with prompts are padded to.
        replayed: tokens of passes with prompts that are replayed once captured; None: every pass is launched.
    """

    budget: BatchingBudget
    window: int | None
    token_bytes: int
    pass_time: Callable[..., PassTime]
    latency_s: float | None = None
    num_ranks: int = 1
    usual_tokens: int | None = None
    padded_sizes: Sequence[int] = ()
    replayed: tuple[int, ...] | None = None

    @functools.cached_property
    def target(self) -> LatencyTarget | None:
        """Limits passes to what keeps the latency, by prediction until passes are observed."""
        if self.latency_s is None:
            return None
        budget = self.budget
        return LatencyTarget(
            self.latency_s, self._pass_seconds, budget.tokens_per_pass, budget.num_sets, self.padded_sizes
        )

    @property
    def order(self) -> PassOrder:
        """The predicted order of every pass."""
        return PassOrder(self.usual_tokens) if self.target is None else self.target.order()

    @property
    def background_order(self) -> PassOrder:
        """The order where all sequences are in the background; `order` where a latency was stated."""
        if self.target is not None or self.usual_tokens is None:
            return self.order
        return PassOrder(_BACKGROUND_PASSES * self.usual_tokens)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a pass, as predicted."""
        return self.order.most_tokens or self.budget.tokens_per_pass

    def free_tokens(self) -> int:
        """Return the tokens of a pass that take no longer than streaming its weights; 0 if nothing streams."""
        few, many = (self.pass_time(number, 1, cache_bytes=0) for number in _TWO_SIZES)
        few_s, many_s = (each.terms["matrix work"] for each in (few, many))
        token_s = (many_s - few_s) / (many.num_tokens - few.num_tokens)
        return max(int((few.transfer_s - few_s) / token_s) + few.num_tokens, 0) if few.transfer_s else 0

    def of_texts(self, prompt_lens: Sequence[int], new_tokens: int | Sequence[int]) -> JobPrediction:
        """Predict prompts without shared prefixes; arguments as for `LLM.predict`.

        Other ranks in step have such prompts too, in another order.

        Raises:
            ConfigError: there are no prompts.
            PlanError: a sequence does not fit the cache even alone.
        """
        if not prompt_lens:
            raise ConfigError("there are no prompts to predict; give the length of at least one")
        each = [new_tokens] * len(prompt_lens) if isinstance(new_tokens, int) else new_tokens
        rows, other = list(zip(prompt_lens, each, strict=True)), None
        if simulated_ranks(self.num_ranks, rows) > 1:
            lengths, news = zip(*Random(0).sample(rows, len(rows)), strict=True)
            other = lengths, news
        simulations = Simulations(prompt_lens, each, self.window, other=other, num_ranks=self.num_ranks)
        passes = simulations.under(self.budget, self.order)
        return self.of_simulated(passes)

    def of_rest(self, prompt_lens: Sequence[int], new_tokens: Sequence[int], missing: Set[int]) -> JobPrediction:
        """Predict the passes in which missing prompts take part, beside others whose tokens are known.

        Args:
            prompt_lens, new_tokens: of all that share passes; tokens that are known as many as they are.
            missing: numbers of those whose tokens count, at least one.

        Raises:
            PlanError: a sequence does not fit the cache even alone.
        """
        runs = simulate_runs(prompt_lens, new_tokens, self.budget, self.window, self.order, wanted=missing)
        found = self.of_runs(runs)
        return replace(found, tokens_per_s=sum(new_tokens[number] for number in missing) / found.seconds)

    def of_simulated(self, passes: RankPasses) -> JobPrediction:
        """Predict simulated passes; of ranks in step those that they make together, and the tokens of one."""
        return self.of_runs(self._counting(passes), passes.own, passes.scale)

    def seconds_of(self, passes: RankPasses) -> float:
        """Return the seconds of simulated passes; as `of_simulated`."""
        seconds: Any = self._times_of(self._counting(passes), passes.scale).seconds
        return float(seconds.sum())

    def _counting(self, passes: RankPasses) -> list[PassRun]:
        """Return the passes whose time counts: those of all ranks, if they make them together."""
        return passes.own if self.num_ranks == 1 else passes.together

    def of_passes(self, sizes: Sequence[PassSize]) -> JobPrediction:
        """Predict passes of these sizes. Raises ConfigError if there are none."""
        return self.of_runs([*map(PassRun, sizes)])

    def of_runs(
        self, runs: Sequence[PassRun], own: Sequence[PassRun] | None = None, scale: float = 1.0
    ) -> JobPrediction:
        """Predict runs of passes.

        Args:
            own: those of one rank, whose tokens count, if ``runs`` are of ranks in step.
            scale: how many times as large each pass is.

        Raises:
            ConfigError: there are no passes.
        """
        if not runs:
            raise ConfigError("no pass was computed yet, so none can be predicted")
        import numpy as np

        times = self._times_of(runs, scale)
        names, terms = list(times.terms), np.stack(np.broadcast_arrays(times.num_tokens, *times.terms.values())[1:])
        slowest = np.bincount(terms.argmax(axis=0), minlength=len(names))  # how many passes each resource limits
        seconds, num_passes = float(terms.max(axis=0).sum()), int(slowest.sum())
        own = runs if own is None else own
        sizes, counts = _sizes_of(own, scale), np.array([run.num_passes for run in own])
        return JobPrediction(
            seconds=seconds,
            num_passes=num_passes,
            tokens_per_pass=int(counts @ sizes[:, 0]) / num_passes,
            tokens_per_s=int(counts @ sizes[:, 1]) / seconds,
            bottleneck=resource_name(names[slowest.argmax()], on_host=times.shares_host),
            most_together=int(sizes[:, 1].max()),
            busy_s=dict(zip(names, terms.sum(axis=1).tolist(), strict=True)),
        )

    def _times_of(self, runs: Sequence[PassRun], scale: float) -> PassTime:
        """Return arrays of the times of all passes, in their order, each launched or replayed as in `PassTimes`."""
        import numpy as np

        sizes, counts = _sizes_of(runs, scale), np.array([run.num_passes for run in runs])
        places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        columns: Any = (np.repeat(column, counts) for column in sizes.T)
        tokens, samples, context, lent, pairs, more_pairs = columns
        size = PassSize(tokens, samples, context + places * tokens, lent, pairs + places * more_pairs)
        is_first = np.arange(len(places)) == 0
        if self.replayed is None:
            return self.time_of(size, is_replayed=False)._replace(num_tokens=tokens).beginning(is_first)
        seen = np.repeat(self._seen_before(sizes[:, :2].tolist(), counts.tolist()), counts) + places
        found = self.time_of(size, is_replayed=seen > PATIENCE)
        captures = 1 + (PATIENCE - 1) * (seen == PATIENCE)
        return found._replace(num_tokens=tokens, launch_s=found.launch_s * captures).beginning(is_first)

    def _seen_before(self, sizes: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[int]:
        """Return how many passes of its form precede each run; fewer than none where nothing is captured.

        Args:
            sizes: tokens and samples of each run's passes.
            counts: how many they are.
        """
        seen, found = Counter[Hashable](), []
        for (num_tokens, num_samples), count in zip(sizes, counts, strict=True):
            form = self.form_of(PassSize(num_tokens, num_samples, 0))
            found.append(_NEVER if form is None else seen[form])
            seen[form] += count
        return found

    def _pass_seconds(self, num_tokens: int) -> float:
        return self.time_of(PassSize(num_tokens, 1, num_tokens)).seconds

    def form_of(self, size: PassSize) -> Hashable:
        """Return what passes that one graph replays have in common; None: none does."""
        return None if self.replayed is None else _form(size.num_tokens, size.num_samples, self.replayed)

    def time_of(self, size: PassSize, *, is_replayed: Any = None) -> PassTime:
        """Predict one pass, or many, if ``size`` and ``is_replayed`` have arrays in place of numbers.

        Args:
            is_replayed: whether its form was captured; by default it was if it ever is, as in a server.
        """
        budget = self.budget
        if is_replayed is None:
            is_replayed = self.form_of(size) is not None
        return self.pass_time(
            size.num_tokens,
            size.num_samples,
            cache_bytes=size.num_context * self.token_bytes,
            num_pairs=size.num_pairs,
            num_parts=-(-size.num_tokens // budget.most_part_tokens),
            lent_bytes=size.num_lent_pages * budget.page_size * self.token_bytes,
            hosted_bytes=self._num_hosted(size) * self.token_bytes if budget.is_hosted else 0,
            is_replayed=is_replayed,
        )

    def _num_hosted(self, size: PassSize) -> int:
        """Return the tokens whose KV-cache pages a pass copies from host memory; last pages count as half full.

        Ignores windows of single layers, which copy less.
        """
        num_before, page_size = size.num_context - size.num_tokens, self.budget.page_size
        num_tokens: int = -largest(-num_before - size.num_samples * page_size // 2, -self.budget.num_pages * page_size)
        return num_tokens


class PassTimes:
    """Predicts passes one after the other: those of a form are launched at first, then captured and replayed.

    Args:
        estimator: of single passes.
    """

    def __init__(self, estimator: JobEstimator) -> None:
        self._estimator = estimator
        self._seen = Counter[Hashable]()
        self._is_first = True
        self._counting = threading.Lock()
        self._num_ended, self._ended_s = 0, 0.0

    def ended_s(self, num_launched: int, sizes: Sequence[PassSize], num_ended: int) -> float:
        """Return the predicted seconds of all passes that have ended; called by several threads.

        Args:
            num_launched: passes so far.
            sizes: of the last of them; the first ``num_ended`` of these have ended.
        """
        with self._counting:
            num_new = num_launched - len(sizes) + num_ended - self._num_ended
            if num_new > 0:
                self._num_ended += num_new
                new = sizes[max(num_ended - num_new, 0) : num_ended]
                self._ended_s += sum(self.next(size).seconds for size in new)
            return self._ended_s

    def next(self, size: PassSize) -> PassTime:
        """Predict the pass that follows those before."""
        found = self._next(size)
        if self._is_first:
            self._is_first = False
            return found.beginning()
        return found

    def _next(self, size: PassSize) -> PassTime:
        form = self._estimator.form_of(size)
        if form is not None:
            self._seen[form] += 1
            if self._seen[form] > PATIENCE + 1:
                return self._estimator.time_of(size, is_replayed=True)
        launched = self._estimator.time_of(size, is_replayed=False)
        if form is None or self._seen[form] <= PATIENCE:
            return launched
        return launched._replace(launch_s=PATIENCE * launched.launch_s)
