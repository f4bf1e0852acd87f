"""The passes that a server computes before its first request, which then waits for no compiler and no capture."""

import logging
from typing import Final

from zinfer.batching.llm import LLM
from zinfer.errors import JobError
from zinfer.jobs.warmup import MOST_PROMPT, compute_passes
from zinfer.planning.pass_sizes import MOST_REPLAYED_TOKENS

log = logging.getLogger("zinfer")

_PROMPT_LENGTHS: Final = (MOST_PROMPT, 16)  # few rows, and many
_TURNS: Final = 2  # the first forward of a form is launched, the second captured


def compute_first_passes(llm: LLM) -> None:
    """Compute passes of the sizes that requests will have: prompts alone, beside rows that continue, and rows alone.

    On a GPU that holds all weights; where they stream, a pass may take longer than compiling.

    Args:
        llm: on the first of its ranks, and idle.
    """
    if llm.device.type == "cuda" and not llm.plan.streamed_bytes:
        compute_twice(llm)


def compute_twice(llm: LLM) -> None:
    """Compute the passes, on any device."""
    try:
        for length in _PROMPT_LENGTHS:
            for _ in range(_TURNS):
                compute_passes(llm, most_prompt=length, most_tokens=MOST_REPLAYED_TOKENS)
        llm.reset_prefix_cache()
    except JobError as error:
        log.warning("kernels are compiled by the first requests, not before them: %s", error)
