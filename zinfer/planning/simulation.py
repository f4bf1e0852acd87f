"""A job's passes before it runs: the scheduler's own decisions over sequences without tokens, and what they will take.

Prompts that begin alike, and sequences that end early, make a job shorter than this; every prompt counts as new here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zinfer.errors import ConfigError
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.step_time import PassTime, speed
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.sequence import Sequence as TokenSequence
from zinfer.units import duration


@dataclass(frozen=True)
class JobPrediction:
    """What a job takes.

    Attributes:
        seconds: of all passes.
        num_passes: walks over the weights.
        tokens_per_pass: computed in each, on average.
        tokens_per_s: new tokens a second.
        bottleneck: the resource that decides how long most passes take.
        steady_s_per_token: of a token that is computed in the middle of the job, where sequences of all ages run.
        most_together: sequences that got a token by one pass, at most.
    """

    seconds: float
    num_passes: int
    tokens_per_pass: float
    tokens_per_s: float
    bottleneck: str
    steady_s_per_token: float
    most_together: int

    def __str__(self) -> str:
        return (
            f"{duration(self.seconds)}, {self.num_passes:,} passes of {self.tokens_per_pass:,.0f} tokens "
            f"({self.bottleneck}), {speed(self.tokens_per_s)}"
        )


@dataclass(frozen=True)
class JobEstimator:
    """Seconds of passes, whether they are simulated or were computed.

    Attributes:
        budget: of pages and tokens.
        window: tokens that every layer of the model sees at most; None where one sees all.
        token_bytes: of one token's keys and values in all layers.
        pass_time: of a pass; `PassClock.pass_time`.
    """

    budget: BatchingBudget
    window: int | None
    token_bytes: int
    pass_time: Callable[..., PassTime]

    def of_texts(self, prompt_lens: Sequence[int], new_tokens: int | Sequence[int]) -> JobPrediction:
        """Predict prompts, none of which begin alike; arguments as for `LLM.predict`.

        Raises:
            ConfigError: there are none.
            PlanError: one does not fit the cache even alone.
        """
        if not prompt_lens:
            raise ConfigError("there are no prompts to predict anything of; give the tokens of one at least")
        each = [new_tokens] * len(prompt_lens) if isinstance(new_tokens, int) else new_tokens
        return self.of_passes(simulate(prompt_lens, each, self.budget, self.window))

    def of_passes(self, sizes: Sequence[PassSize]) -> JobPrediction:
        """Predict passes of these sizes.

        Raises:
            ConfigError: there are none.
        """
        if not sizes:
            raise ConfigError("no pass was computed yet, so that none can be predicted")
        times = [self._time_of(size) for size in sizes]
        seconds = sum(each.seconds for each in times)
        names = [each.bottleneck for each in times]
        num_tokens, num_new = sum(size.num_tokens for size in sizes), sum(size.num_samples for size in sizes)
        return JobPrediction(
            seconds=seconds,
            num_passes=len(sizes),
            tokens_per_pass=num_tokens / len(sizes),
            tokens_per_s=num_new / seconds,
            bottleneck=max(set(names), key=names.count),
            steady_s_per_token=_steady(times),
            most_together=max(size.num_samples for size in sizes),
        )

    def _time_of(self, size: PassSize) -> PassTime:
        budget = self.budget
        return self.pass_time(
            size.num_tokens,
            size.num_samples,
            cache_bytes=size.num_context * self.token_bytes,
            num_pairs=size.num_pairs,
            num_parts=-(-size.num_tokens // budget.most_part_tokens),
            lent_bytes=size.num_lent_pages * budget.page_size * self.token_bytes,
            hosted_bytes=self._num_hosted(size) * self.token_bytes if budget.is_hosted else 0,
        )

    def _num_hosted(self, size: PassSize) -> int:
        """Tokens whose keys and values a pass brings from host memory: whole pages, each sequence's last half full.

        Windows of single layers are not looked at: these bring less.
        """
        num_before, page_size = size.num_context - size.num_tokens, self.budget.page_size
        return min(num_before + size.num_samples * page_size // 2, self.budget.num_pages * page_size)


def _steady(times: Sequence[PassTime]) -> float:
    """Seconds a token: the first sequences have ended after 60 % of the tokens, the last ones begin after 90 %."""
    num_tokens, done = sum(each.num_tokens for each in times), 0
    middle = []
    for each in times:
        if 0.6 * num_tokens <= done <= 0.9 * num_tokens:
            middle.append(each)
        done += each.num_tokens
    several = middle or times
    return sum(each.seconds for each in several) / sum(each.num_tokens for each in several)


def simulate(
    prompt_lens: Sequence[int], new_tokens: Sequence[int], budget: BatchingBudget, window: int | None = None
) -> list[PassSize]:
    """Schedule the passes of a job.

    Args:
        prompt_lens: tokens of each prompt.
        new_tokens: tokens generated after each.
        budget: of pages and tokens.
        window: as for the `Scheduler`.

    Raises:
        PlanError: a sequence does not fit the cache even alone.
    """
    # No sequence finds pages of another, because no two begin alike, and names for pages that nobody finds take most of
    # the time. But one that was preempted may find its own when it resumes.
    passes = _passes(prompt_lens, new_tokens, budget, window, shares=False)
    return passes or _passes(prompt_lens, new_tokens, budget, window, shares=True)


def _passes(
    prompt_lens: Sequence[int], new_tokens: Sequence[int], budget: BatchingBudget, window: int | None, *, shares: bool
) -> list[PassSize]:
    """The passes; none without sharing as soon as a sequence is preempted."""
    scheduler = budget.scheduler(window)
    for number, (prompt_len, count) in enumerate(zip(prompt_lens, new_tokens, strict=True)):
        scheduler.add(TokenSequence(number, (number, *[0] * (prompt_len - 1)), count, shares=shares))
    sizes = []
    while (coming := scheduler.schedule()) is not None:
        if scheduler.has_preempted and not shares:
            return []
        sizes.append(coming.size)
        scheduler.advance(coming)
    return sizes


class Simulations:
    """Simulates one job under several budgets, and what two of them have in common only once.

    Passes none of which is as large as it may be are the same under any larger limit: something else ended them.

    Args:
        prompt_lens, new_tokens, window: as for `simulate`; ``window`` stays to be read.
    """

    def __init__(self, prompt_lens: Sequence[int], new_tokens: Sequence[int], window: int | None) -> None:
        self._prompt_lens = prompt_lens
        self._new_tokens = new_tokens
        self.window = window
        # By all that decides passes but the tokens that one may carry; with that limit.
        self._found: dict[tuple[object, ...], list[tuple[int, list[PassSize]]]] = {}

    def under(self, budget: BatchingBudget) -> list[PassSize]:
        """The passes under a budget; raises as `simulate` does."""
        pages = (budget.num_pages, budget.page_size, budget.most_swapped_pages)
        found = self._found.setdefault((*pages, budget.max_sequences, budget.order, budget.lends), [])
        limit = budget.tokens_per_pass
        for other, passes in found:
            if limit == other or max(size.num_tokens for size in passes) < other < limit:
                return passes
        passes = simulate(self._prompt_lens, self._new_tokens, budget, self.window)
        found.append((limit, passes))
        return passes
