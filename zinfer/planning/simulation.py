"""A job's passes before it runs: the scheduler's own decisions over texts without tokens, and what they will take.

Prompts that begin alike, and texts that end early, make a job shorter than this; every prompt counts as new here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.prediction import PassTime, speed
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.sequence import Sequence as Text
from zinfer.units import duration


class PassTimeOf(Protocol):
    """`PassClock.pass_time` of `zinfer.planning.prediction`."""

    def __call__(
        self,
        num_tokens: int,
        num_rows: int,
        *,
        cache_bytes: int,
        num_pairs: int,
        num_parts: int,
        lent_bytes: int,
        hosted_bytes: int,
    ) -> PassTime: ...


@dataclass(frozen=True)
class JobPrediction:
    """What a job takes.

    Attributes:
        seconds: of all passes.
        num_passes: walks over the weights.
        tokens_per_pass: computed in each, on average.
        tokens_per_s: new tokens a second.
        bottleneck: the resource that decides how long most passes take.
        steady_s_per_token: of a token that is computed in the middle of the job, where texts of all ages run.
        most_together: texts that got a token by one pass, at most.
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


def simulate(
    prompt_lens: Sequence[int], new_tokens: Sequence[int], budget: BatchingBudget, window: int | None = None
) -> list[PassSize]:
    """The passes of a job.

    Args:
        prompt_lens: tokens of each prompt.
        new_tokens: tokens generated after each.
        budget: of pages and tokens.
        window: as for the `Scheduler`.

    Raises:
        PlanError: a text does not fit the cache even alone.
    """
    passes = _passes(prompt_lens, new_tokens, budget, window, shares=False)
    if passes is None:
        passes = _passes(prompt_lens, new_tokens, budget, window, shares=True)
    assert passes is not None
    return passes


def _passes(
    prompt_lens: Sequence[int], new_tokens: Sequence[int], budget: BatchingBudget, window: int | None, *, shares: bool
) -> list[PassSize] | None:
    """None without sharing as soon as a text has to make room: it might find pages of its own when it comes back.

    Without that no text finds any, because no two begin alike; and names for pages that nobody finds take most of the
    time.
    """
    scheduler = budget.scheduler(window)
    for number, (prompt_len, count) in enumerate(zip(prompt_lens, new_tokens, strict=True)):
        scheduler.add(Text(number, (number, *[0] * (prompt_len - 1)), count, shares=shares))
    sizes = []
    while (coming := scheduler.schedule()) is not None:
        if scheduler.has_preempted and not shares:
            return None
        sizes.append(coming.size)
        scheduler.advance(coming)
    return sizes


def predict_job(
    sizes: Sequence[PassSize], token_bytes: int, budget: BatchingBudget, pass_time: PassTimeOf
) -> JobPrediction:
    """How long the passes of a job take.

    Args:
        sizes: of the passes, one at least.
        token_bytes: of one token's keys and values in all layers.
        budget: that the passes are cut and stored by.
        pass_time: of a pass.
    """
    times = [
        pass_time(
            size.num_tokens,
            size.num_samples,
            cache_bytes=size.num_context * token_bytes,
            num_pairs=size.num_pairs,
            num_parts=-(-size.num_tokens // budget.most_part_tokens),
            lent_bytes=size.num_lent_pages * budget.page_size * token_bytes,
            hosted_bytes=_coming_tokens(size, budget) * token_bytes if budget.is_hosted else 0,
        )
        for size in sizes
    ]
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


def _coming_tokens(size: PassSize, budget: BatchingBudget) -> int:
    """Tokens whose keys and values a pass brings from host memory: whole pages, the last one of a text half full.

    Windows of single layers are not looked at: these bring less.
    """
    num_before = size.num_context - size.num_tokens
    return min(num_before + size.num_samples * budget.page_size // 2, budget.num_pages * budget.page_size)


def _steady(times: Sequence[PassTime]) -> float:
    """Seconds a token: the first texts have ended after 60 % of the tokens, and the last ones begin after 90 %."""
    num_tokens, done = sum(each.num_tokens for each in times), 0
    middle = []
    for each in times:
        if 0.6 * num_tokens <= done <= 0.9 * num_tokens:
            middle.append(each)
        done += each.num_tokens
    several = middle or times
    return sum(each.seconds for each in several) / sum(each.num_tokens for each in several)
