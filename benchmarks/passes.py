"""Measures seconds per pass in the steady state, where the stream never idles between timed calls."""

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
    """Seconds of each pass that was timed."""

    prefill_s: list[float]
    decode_s: list[float]


class Passes:
    """Runs an engine on ``batch`` sequences with ``prompt`` tokens; the first run warms up.

    A decode pass is the time between two tokens. Prefills run back to back, each measured from the end of the last, so
    that what was fetched ahead of one is paid by the one before.
    """

    def __init__(self, engine: zinfer.InferenceEngine, batch: int, prompt: int) -> None:
        ids = torch.randint(10, 50000, (batch, prompt), generator=torch.Generator().manual_seed(2))
        self._engine = engine
        self._inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self._tokens(2)

    def time(self, num_prefills: int, num_decodes: int) -> PassTimes:
        """Time so many of each, one after the other."""
        ends = [self._tokens(1)[0] for _ in range(num_prefills)]
        tokens = self._tokens(num_decodes + 1)
        return PassTimes(_steps([*ends, tokens[0]]), _steps(tokens))

    def _tokens(self, num_new: int) -> list[float]:
        """When each of the new tokens was there."""
        stamps = _Stamps()
        self._engine.generate(
            **self._inputs,
            do_sample=False,
            pad_token_id=1,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
        return stamps.times_s


def _steps(times_s: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]
