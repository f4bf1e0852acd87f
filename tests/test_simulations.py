"""Simulations of one job under many budgets: kept ones are those made anew, and names of pages change none of them."""

import random
from dataclasses import replace

import pytest
import torch

from zinfer.planning import simulation
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.memory import Footprint
from zinfer.planning.simulation import Simulations, simulate
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.sequence import Sequence as Text

LIMITS = (9, 70, 10_000, 300, 1_500, 9_000, 70)


def budget_of(draw: random.Random) -> BatchingBudget:
    """A small one, in host memory or on the device."""
    num_pages = draw.randint(40, 400)
    footprint = Footprint(num_pages << 20, 0, 0, host_bytes=draw.choice([0, num_pages << 20]))
    parks = draw.random() < 0.3
    return BatchingBudget(
        1, 1, draw.choice([3, 20, 500]), num_pages, 4, torch.float16, "arrival", True, footprint, parks_on_disk=parks
    )


def lengths_of(draw: random.Random) -> tuple[list[int], list[int]]:
    count = draw.randint(1, 60)
    return [draw.randint(1, 90) for _ in range(count)], [draw.randint(1, 40) for _ in range(count)]


def with_names(
    prompt_lens: list[int], new_tokens: list[int], budget: BatchingBudget, window: int | None
) -> list[PassSize]:
    """The passes of texts whose pages all have names, as those of a real job."""
    scheduler = budget.scheduler(window)
    for number, (prompt_len, count) in enumerate(zip(prompt_lens, new_tokens, strict=True)):
        scheduler.add(Text(number, (number, *[0] * (prompt_len - 1)), count))
    sizes = []
    while (coming := scheduler.schedule()) is not None:
        sizes.append(coming.size)
        scheduler.advance(coming)
    return sizes


@pytest.mark.parametrize("window", [None, 30])
def test_what_is_kept_is_what_would_be_simulated_anew(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    draw, num_anew, num_preempted = random.Random(5), 0, 0

    def counting(*args: object) -> list[PassSize]:
        nonlocal num_anew
        num_anew += 1
        return simulate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(simulation, "simulate", counting)
    for _ in range(20):
        budget, lengths = budget_of(draw), lengths_of(draw)
        kept = Simulations(*lengths, window)
        for limit in LIMITS:
            limited = replace(budget, tokens_per_pass=limit)
            wanted = with_names(*lengths, limited, window)
            assert kept.under(limited) == wanted
            num_tokens = sum(lengths[0]) + sum(lengths[1]) - len(lengths[0])
            num_preempted += sum(size.num_tokens for size in wanted) > num_tokens
        assert kept.under(replace(limited, num_pages=1000)) == with_names(
            *lengths, replace(limited, num_pages=1000), window
        )
    assert 0 < num_anew < 20 * len(LIMITS) * 0.9
    assert num_preempted > 0, "texts that are computed again"
