"""Log-probabilities of prompts' tokens, out of the logits that a pass computes piece by piece."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zinfer.batching.running_request import RunningRequest
from zinfer.sampling.async_copy import send
from zinfer.sampling.sampler import Sampler
from zinfer.sampling.weighed import Weighed
from zinfer.scheduling.schedule import Chunks


@dataclass(frozen=True)
class ScoredSpan:
    """Neighbouring tokens of a prompt that a pass scores: those at positions ``begin`` to ``end`` (exclusive)."""

    request: RunningRequest
    begin: int
    end: int


class PromptScorer:
    """Weighs the prompts' tokens of one pass, and keeps the logits that are sampled.

    Args:
        sampler: weighs them.
        chunks: of the pass; some have `Chunks.extra_logits`.
        running: the requests by their sequences' numbers.

    Attributes:
        spans: what is scored, in order.
        scores: the weighed tokens of all spans, in order, on the device.
    """

    def __init__(self, sampler: Sampler, chunks: Chunks, running: Mapping[int, RunningRequest]) -> None:
        self._sampler = sampler
        self.spans: list[ScoredSpan] = []
        self.scores: list[Weighed] = []
        self._sampled: list[torch.Tensor] = []
        self._token_ids = array("q")
        self._nums_top: list[int] = []
        counts = np.array(chunks.num_logits, dtype=np.int64)
        self._samples = np.zeros(counts.sum(), dtype=np.bool_)
        self._samples[(counts.cumsum() - 1)[np.array(chunks.samples)]] = True
        for place, count in chunks.extra_logits.items():
            request = running[chunks.sequences[place].number]
            end = chunks.ends[place] - chunks.samples[place] + 1  # a token's logits score the next one
            self.spans.append(ScoredSpan(request, end - count, end))
            self._token_ids += array("q", request.sequence.prompt_ids[end - count : end])
            self._nums_top += [request.request.params.prompt_logprobs or 0] * count

    def take(self, first: int, logits: torch.Tensor) -> None:
        """Take the logits of a pass's wanted tokens from number ``first`` on."""
        samples = self._samples[first : first + len(logits)]
        if not samples.any():
            self._weigh(logits)
            return
        self._sampled.append(logits[_places(samples, logits.device)])
        if not samples.all():
            self._weigh(logits[_places(~samples, logits.device)])

    @property
    def sampled(self) -> torch.Tensor:
        """The logits of the samples, [samples, vocabulary]."""
        if self._sampled:
            return torch.cat(self._sampled)
        return torch.empty(0, self._sampler.vocab_size, device=self._sampler.device)

    def _weigh(self, logits: torch.Tensor) -> None:
        count = len(logits)
        self.scores += self._sampler.score(logits, self._token_ids[:count], self._nums_top[:count])
        del self._token_ids[:count], self._nums_top[:count]


def _places(chosen: "np.ndarray[tuple[int], np.dtype[np.bool_]]", device: torch.device) -> torch.Tensor:
    numbers: Sequence[int] = np.flatnonzero(chosen).tolist()
    return send(numbers, torch.int64, device)
