"""Seconds of a pass in the steady state: the stream never rests between the calls that are timed."""

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import zinfer


class _Stamps(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token is there; stops nothing."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        done.cpu()  # waits for the compute, not for the copies
        self.times_s.append(time.perf_counter())
        return done


@dataclass(frozen=True)
class PassTimes:
    """Medians, in seconds."""

    prefill_s: float
    decode_s: float


def time_passes(
    engine: zinfer.InferenceEngine, batch: int, prompt: int, num_prefills: int, num_decodes: int, *, warm: bool = False
) -> PassTimes:
    """Time passes of ``batch`` sequences with ``prompt`` tokens, after a warm-up of the same shapes unless ``warm``.

    A decode pass is the time between two tokens. Prefills run back to back, each measured from the end of the last, so
    that what was fetched ahead of one is paid by the one before.
    """
    ids = torch.randint(10, 50000, (batch, prompt), generator=torch.Generator().manual_seed(2))
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 1}

    def run(num_new: int) -> list[float]:
        stamps = _Stamps()
        criteria = StoppingCriteriaList([stamps])
        engine.generate(**options, max_new_tokens=num_new, min_new_tokens=num_new, stopping_criteria=criteria)
        return stamps.times_s

    if not warm:
        run(2)
    ends = [run(1)[0] for _ in range(num_prefills + 1)]
    tokens = run(num_decodes + 2)[1:]
    return PassTimes(_median_step(ends), _median_step(tokens))


def _median_step(times_s: list[float]) -> float:
    return statistics.median(after - before for before, after in pairwise(times_s))
