"""The passes that a server computes before its first request, which then waits for no compiler and no capture."""

import logging
from collections.abc import Iterator
from typing import Final

from zinfer.batching.llm import LLM
from zinfer.errors import JobError
from zinfer.jobs.warmup import Call, compute_calls, own_prompt
from zinfer.planning.pass_sizes import REPLAYED_TOKENS
from zinfer.requests.sampling_params import SamplingParams

log = logging.getLogger("zinfer")

_DECODES: Final = (128, 112, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1)
_ROWS_BESIDE: Final = (0, 20, 70)  # a prompt: the pass has 16 segments, 64, 128
_TURNS: Final = 2  # the first forward of a form is launched, the second captured


def compute_first_passes(llm: LLM) -> None:
    """Compute passes of the sizes that requests will have: rows that continue, alone and beside prompts.

    On a GPU that holds all weights; where they stream, a pass may take longer than compiling.

    Args:
        llm: on the first of its ranks, and idle.
    """
    if llm.device.type == "cuda" and not llm.plan.streamed_bytes:
        compute_twice(llm)


def compute_twice(llm: LLM) -> None:
    """Compute the passes, on any device."""
    try:
        compute_calls(llm, _calls(llm))
        llm.reset_prefix_cache()
    except JobError as error:
        log.warning("kernels are compiled by the first requests, not before them: %s", error)


def _calls(llm: LLM) -> Iterator[Call]:
    """Yield a call whose rows end one after the other, then calls of a single pass, for each size of passes."""
    budget = llm.batching
    most_rows = min(budget.max_sequences, budget.num_pages)
    most_len = min(llm.limits.most_tokens or REPLAYED_TOKENS[-1] + 1, budget.page_size * budget.num_pages) - 1
    sizes = [size for size in _DECODES if size <= most_rows for _ in range(_TURNS)][:most_len]
    yield (
        [own_prompt(llm, row, 1) for row in range(sizes[0])],
        [_params(sum(size > row for size in sizes), temperature=row % 2) for row in range(sizes[0])],
    )
    for num_tokens in REPLAYED_TOKENS:
        for num_beside in _ROWS_BESIDE:
            lengths = _lengths(num_tokens - num_beside, most_len) + [1] * num_beside
            if max(lengths) > 1 and num_tokens <= budget.tokens_per_pass and len(lengths) <= most_rows:
                prompts = [own_prompt(llm, row, length) for row, length in enumerate(lengths)]
                for _ in range(_TURNS):
                    yield prompts, [_params(1)] * len(prompts)


def _lengths(num_tokens: int, most_len: int) -> list[int]:
    """Return the lengths of prompts of so many tokens together."""
    return [min(most_len, num_tokens - begin) for begin in range(0, num_tokens, most_len)]


def _params(num_new: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True, temperature=temperature, seed=1)
