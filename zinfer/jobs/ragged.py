"""Completes prompts by continuous batching."""

from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from zinfer.batching.completion import Completion
from zinfer.batching.rehearsal import JobPrediction
from zinfer.config.settings import Batching
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.request import JobRequest
from zinfer.jobs.timeline import Load
from zinfer.llm import LLM
from zinfer.offload.stats import RunStats


class RaggedCompleter:
    """An LLM's passes; each call begins with an empty cache, and so with the same passes.

    Args:
        stated: what the configuration says of the sizes.
        kept: ``sizes`` of the completer that began the job; what is not stated is taken from them.
        meter: shows the tokens that are generated.
    """

    def __init__(self, request: JobRequest, stated: Batching, kept: Mapping[str, int], meter: Meter) -> None:
        options: dict[str, object] = {name: size for name, size in kept.items() if getattr(stated, name) is None}
        if request.trace is not None:
            options["trace"] = str(request.trace)
        self._llm = LLM(request.model, request.config, device=request.device, **options)
        self.predicted_s = 0.0
        self._meter = meter
        meter.count_tokens = lambda: self._llm.num_new_tokens

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of the configuration's keys."""
        budget = self._llm.batching
        return {
            "tokens_per_pass": budget.tokens_per_pass,
            "max_sequences": budget.max_sequences,
            "kv_page_size": budget.page_size,
            "kv_cache_memory": budget.footprint.kv_bytes,
        }

    @property
    def plan(self) -> Any:
        return self._llm.plan

    def forecast(self, prompts: Sequence[Prompt]) -> tuple[str, float]:
        fitting = [each for each in prompts if self._llm.fits(len(each.token_ids), each.max_new_tokens)]
        if not fitting:
            return "nothing, since no row of the first batch fits the KV cache", 0.0
        predicted = self._predict(fitting, [prompt.max_new_tokens for prompt in fitting])
        return f"{predicted} for {len(fitting):,} rows", predicted.tokens_per_s

    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, tuple[Completion, ...]], None, None]:
        """As `Completer.complete`; all prompts are computed, since they share passes."""
        self._llm.reset_prefix_cache()
        found: defaultdict[int, list[Completion]] = defaultdict(list)
        num_new = [0] * len(prompts)
        token_ids = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        with closing(self._llm.stream(token_ids, [prompt.params for prompt in prompts])) as stream:
            for completion in stream:
                index = completion.prompt_index
                found[index].append(completion)
                num_new[index] = max(num_new[index], len(completion.token_ids))
                if len(found[index]) == prompts[index].params.n:
                    samples = sorted(found.pop(index), key=lambda each: each.sample_index)
                    yield prompts[index], tuple(samples)
        computed = [(prompt, num) for prompt, num in zip(prompts, num_new, strict=True) if num]
        if computed:
            self.predicted_s += self._predict(*zip(*computed, strict=True)).seconds

    def stats(self) -> RunStats:
        return self._llm.stats()

    def load(self) -> Load:
        llm = self._llm
        return Load(llm.num_tokens, llm.num_new_tokens, llm.num_running, llm.num_parked_pages)

    def close(self) -> None:
        # The display may look at its meter once more.
        self._meter.num_tokens, self._meter.count_tokens = self._llm.num_new_tokens, None
        self._llm.close()

    def _predict(self, prompts: Sequence[Prompt], num_new: Sequence[int]) -> JobPrediction:
        repeated = [(len(p.token_ids), num) for p, num in zip(prompts, num_new, strict=True) for _ in range(p.params.n)]
        lens, new = zip(*repeated, strict=True)
        return self._llm.predict(lens, new)
