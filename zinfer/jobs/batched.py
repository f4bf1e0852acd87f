"""Completes prompts by continuous batching."""

from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import Final

from zinfer.batching.llm import LLM
from zinfer.config.settings import Batching
from zinfer.jobs.progress import Forecast, Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.request import JobRequest
from zinfer.jobs.timeline import Load
from zinfer.offload.stats import RunStats
from zinfer.offload.tensor_checksums import TensorChecksums
from zinfer.planning.job_plan import ROWS_TOGETHER
from zinfer.requests.completion import Completion

_MOST_SIMULATED: Final = 1024
_MOST_BATCH_S: Final = 600.0
_LEAST_PACE: Final = 0.9
_SWAPS: Final = "swaps_to_disk"


class RaggedCompleter:
    """An LLM's passes; each call begins with an empty cache, and so with the same passes.

    Args:
        stated: what the configuration says of the sizes.
        kept: ``sizes`` of the completer that began the job; what is not stated is taken from them.
        meter: shows the tokens that are generated.
        checksums: taken of weights as they are read.
    """

    def __init__(
        self,
        request: JobRequest,
        stated: Batching,
        kept: Mapping[str, int],
        meter: Meter,
        checksums: TensorChecksums | None = None,
    ) -> None:
        sizes = {name: size for name, size in kept.items() if name != _SWAPS}
        options: dict[str, object] = {name: size for name, size in sizes.items() if getattr(stated, name) is None}
        if request.trace is not None:
            options["trace"] = str(request.trace)
        # Which sequences are computed again decides what passes carry: not by rates that are measured anew.
        swaps = _SWAPS in kept if kept else None
        self._llm = LLM(
            request.model,
            request.config,
            device=request.device,
            swaps_to_disk=swaps,
            checksums=checksums,
            **options,
        )
        self.predicted_s = 0.0
        self._meter = meter
        meter.count_tokens = lambda: self._llm.num_new_tokens
        meter.count_passes = lambda: self._llm.num_passes

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of the configuration's keys, and whether preempted sequences are kept on the disk."""
        budget = self._llm.batching
        swaps = {_SWAPS: 1} if budget.swaps_to_disk else {}
        return swaps | {
            "tokens_per_pass": budget.tokens_per_pass,
            "max_sequences": budget.max_sequences,
            "kv_page_size": budget.page_size,
            "kv_cache_memory": budget.kv_bytes,
        }

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        """Of the first rows alone: the passes of all of them would take long to simulate."""
        fitting = [each for each in prompts if self._llm.fits(len(each.token_ids), each.max_new_tokens)]
        sequences = [prompt for prompt in fitting[:_MOST_SIMULATED] for _ in range(prompt.params.n)]
        if not sequences:
            return Forecast("nothing, since no row of the first batch fits the KV cache")
        prompt_lens = [len(each.token_ids) for each in sequences]
        predicted = self._llm.predict(prompt_lens, [each.max_new_tokens for each in sequences])
        more = len(fitting) / min(len(fitting), _MOST_SIMULATED)
        text = f"{predicted} for {len(sequences):,} sequences"
        return Forecast(text, predicted.tokens_per_s, predicted.seconds * more, predicted.num_passes * more)

    def rows_together(self, prompts: Sequence[Prompt]) -> int:
        """So few that they take ten minutes at most, but not where passes that cost the same would carry fewer rows."""
        count, forecast = len(prompts), self.forecast(prompts)
        while forecast.seconds > _MOST_BATCH_S and count > 1:
            fewer = self.forecast(prompts[: count // 2])
            if fewer.tokens_per_s < _LEAST_PACE * forecast.tokens_per_s:
                break
            count, forecast = count // 2, fewer
        return count if count < len(prompts) else max(count, ROWS_TOGETHER)

    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, tuple[Completion, ...]], None, None]:
        """As `Completer.complete`; all prompts are computed, since they share passes."""
        self._llm.reset_prefix_cache()
        found: defaultdict[int, list[Completion]] = defaultdict(list)
        num_computed = 0
        token_ids = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        with closing(self._llm.stream(token_ids, [prompt.params for prompt in prompts])) as stream:
            for completion in stream:
                index = completion.prompt_index
                found[index].append(completion)
                num_computed += len(completion.token_ids)
                if len(found[index]) == prompts[index].params.n:
                    samples = sorted(found.pop(index), key=lambda each: each.sample_index)
                    yield prompts[index], tuple(samples)
        if num_computed:
            self.predicted_s += self._llm.predict_passes().seconds

    def stats(self) -> RunStats:
        return self._llm.stats()

    def load(self) -> Load:
        llm = self._llm
        return Load(llm.num_tokens, llm.num_new_tokens, llm.num_running, llm.num_swapped_pages)

    def close(self) -> None:
        # The display may look at its meter once more.
        self._meter.num_tokens, self._meter.count_tokens = self._llm.num_new_tokens, None
        self._meter.count_passes = None
        self._llm.close()
