"""Predict the times of a server's answers by its load: to the first token, and from token to token.

A load is a number of requests that are always under way: for each that ends another one arrives. What runs of them is
bounded by sequences, pages and tokens of a pass; the others wait for their turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zinfer.planning.job_estimator import JobEstimator
from zinfer.scheduling.page_allocator import pages_alone
from zinfer.scheduling.schedule import PassSize
from zinfer.units import duration

_USUAL: Final = (512, 128)  # tokens of a prompt and new ones
LOADS: Final = (1, 16, 256)


@dataclass(frozen=True)
class ServingLatency:
    """Average times under one load.

    Attributes:
        num_requests: the load.
        first_token_s: from a request's arrival to its first token.
        between_s: between two of its tokens.
        tokens_per_s: new tokens of all requests.
    """

    num_requests: int
    first_token_s: float
    between_s: float
    tokens_per_s: float


def usual_lengths(most: int | None) -> tuple[int, int]:
    """Return the tokens of a usual prompt and its new ones, fewer where both together are at most ``most``."""
    if most is None or sum(_USUAL) <= most:
        return _USUAL
    new_tokens = max(most // 5, 1)
    return max(most - new_tokens, 1), new_tokens


def predict_latency(
    estimator: JobEstimator, prompt_len: int, new_tokens: int, loads: Sequence[int] = LOADS
) -> list[ServingLatency]:
    """Predict the times under each load, in passes that keep to the estimator's latency.

    Args:
        prompt_len, new_tokens: tokens of each request.
    """
    return [_under(estimator, prompt_len, new_tokens, count) for count in loads]


def describe_latency(found: Sequence[ServingLatency], prompt_len: int, new_tokens: int) -> str:
    """Return one line on the times."""
    each = [
        f"{load.num_requests:,} at once: {duration(load.first_token_s)} to the first token, then "
        f"{duration(load.between_s)} a token"
        for load in found
    ]
    return f"requests of {prompt_len:,} tokens in and {new_tokens:,} out, {'; '.join(each)}"


def describe_unreachable(estimator: JobEstimator) -> str | None:
    """Return one line if even the shortest pass takes longer than the latency asked for; None if it does not."""
    target, latency_s = estimator.target, estimator.latency_s
    if target is None or latency_s is None or target.reachable_s <= latency_s:
        return None
    shortest = estimator.time_of(PassSize(1, 1, 1))
    return (
        f"max_token_latency: {duration(latency_s)} cannot be reached, because a pass of one token takes "
        f"{duration(shortest.seconds)} ({shortest.bottleneck}); {duration(target.reachable_s)} can, with passes of "
        f"{estimator.most_tokens:,} tokens at most"
    )


def _under(estimator: JobEstimator, prompt_len: int, new_tokens: int, num_requests: int) -> ServingLatency:
    budget, most_tokens = estimator.budget, estimator.most_tokens
    each = 1 + prompt_len / new_tokens  # tokens of a pass by running sequence, with its successor's prompt
    num_pages = pages_alone(prompt_len, new_tokens, budget.page_size, estimator.window)
    fitting = min(budget.num_pages / num_pages, budget.max_sequences, most_tokens / each)
    running = max(min(num_requests, fitting), 1.0)
    num_tokens = min(math.ceil(running * each), most_tokens)
    num_context = int(running * (prompt_len + new_tokens / 2))
    num_pairs = int(running / new_tokens * prompt_len * prompt_len / 2)
    size = PassSize(num_tokens, math.ceil(running), max(num_context, num_tokens), num_pairs=num_pairs)
    pass_s = estimator.time_of(size).seconds
    num_chunks = math.ceil(prompt_len / max(most_tokens - running, 1))
    alone = PassSize(min(prompt_len, most_tokens), 1, prompt_len, num_pairs=prompt_len * prompt_len // 2)
    # Its own pass has a whole prompt, or the largest chunk of it, and it arrives while another one is computed.
    first_s = num_chunks * max(pass_s, estimator.time_of(alone).seconds) + pass_s / 2
    waiting_s = (num_requests - running) * new_tokens * pass_s / running
    return ServingLatency(num_requests, first_s + waiting_s, pass_s * budget.num_sets, running / pass_s)
