"""Compute the rows of a job: the base class, and continuous batching through `LLM`."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from typing import Any, Final, TypeAlias

from zinfer.batching.llm import LLM
from zinfer.config.settings import Batching
from zinfer.engine.division import Prepare
from zinfer.engine.input_errors import InputErrors
from zinfer.jobs.progress import Forecast, Load
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.records import Encoding
from zinfer.jobs.rehearsal import Rehearsal
from zinfer.jobs.request import JobRequest
from zinfer.offload.stats import RunStats
from zinfer.planning.job_plan import ROWS_TOGETHER
from zinfer.planning.job_sizes import MOST_SWAPPED, PAGES, SWAPS, Sizes, split
from zinfer.planning.step_time import LAUNCHING
from zinfer.requests.completion import Completion

Answer: TypeAlias = tuple[Completion, ...] | Encoding

_MOST_SIMULATED: Final = 1024
_MOST_BATCH_S: Final = 600.0
_LEAST_PACE: Final = 0.9


class Completer(ABC):
    """Completes prompts. Results depend on these prompts and on `sizes`, never on earlier calls.

    Args:
        stats, close: methods of the engine.
        input_errors: measures products of the first rows.

    Attributes:
        input_errors: as given.
        predicted_s: predicted seconds for the prompts completed so far.
        launching_s: those of them in which Python's launches were to be waited for.
        sizes: batch and cache sizes, kept for a run that resumes the job.
        num_pages: of the KV cache; 0 if it has none.
        most_under_way: rows that are computed at once, where no others are computed again after a crash; None: all of
            a batch are.
    """

    def __init__(self, stats: Callable[[], RunStats], close: Callable[[], None], input_errors: InputErrors) -> None:
        self.stats, self.close, self.input_errors = stats, close, input_errors
        self.predicted_s = self.launching_s = 0.0
        self.sizes: dict[str, int | str] = {}
        self.num_pages = 0
        self.most_under_way: int | None = None
        self._load = Load()

    def load(self) -> Load:
        """Return the counters of the passes so far. Thread-safe."""
        return self._load

    @property
    def first_pass_s(self) -> float:
        """Seconds of the first pass; 0 if passes are not measured one by one."""
        return 0.0

    def choose_batch_size(self, prompts: Sequence[Prompt]) -> int:
        """Return the best batch size, judged by these first prompts."""
        return len(prompts)

    def follows(self, prompt: Prompt) -> bool:
        """Whether the row of a prompt is written, and takes its place in the passes without being computed again."""
        return False

    @abstractmethod
    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        """Predict the time and the number of passes for these prompts."""

    @abstractmethod
    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, Answer], None, None]:
        """Yield each prompt with its encoding, or with its completions once all of them are finished.

        Args:
            wanted: identities of the prompts that are needed; others may be skipped if that changes no result.
        """


def load_of(llm: LLM) -> Load:
    """Return the counters of an `LLM`."""
    return Load(
        llm.num_passes,
        llm.num_tokens,
        llm.num_new_tokens,
        llm.num_running,
        llm.num_swapped_pages,
        llm.predicted_pass_s(),
        llm.last_pass_s,
    )


class RaggedCompleter(Completer):
    """Completes prompts with an `LLM`. Each call starts with an empty prefix cache, so its passes are reproducible.

    Args:
        stated: sizes set in the configuration.
        kept: sizes that were planned, or those of the completer that began the job; stated ones come first.
        prepare: as for `LLM`.
    """

    def __init__(self, request: JobRequest, stated: Batching, kept: Sizes, prepare: Prepare) -> None:
        keys, arguments = split(kept)
        options: dict[str, Any] = {name: size for name, size in keys.items() if getattr(stated, name) in (None, "auto")}
        if request.trace is not None:
            options["trace"] = str(request.trace)
        options |= request.keys
        self._rehearsal = Rehearsal(request.model, request.config, options)
        self._llm = LLM(
            request.model,
            request.config,
            **arguments,
            prepare=prepare,
            beside_load=self._rehearsal.beside_load,
            **options,
        )
        super().__init__(self._llm.stats, self._llm.close, self._llm.measure_input_errors())
        budget = self._llm.batching
        self.sizes = {name: size for name, size in options.items() if isinstance(size, str) and name in kept}
        if budget.swaps_to_disk:
            self.sizes[SWAPS] = 1
        self.sizes |= {
            "tokens_per_pass": budget.tokens_per_pass,
            "max_sequences": budget.max_sequences,
            "kv_page_size": budget.page_size,
            **({"kv_cache_memory": budget.kv_bytes} if arguments[PAGES] is None else {PAGES: budget.num_pages}),
            **({MOST_SWAPPED: budget.most_swapped_pages} if budget.most_swapped_pages else {}),
        }
        self.num_pages = budget.num_pages
        self.most_under_way = None if self._llm.has_experts else budget.max_sequences

    def load(self) -> Load:
        return load_of(self._llm)

    @property
    def first_pass_s(self) -> float:
        return self._llm.first_pass_s

    def follows(self, prompt: Prompt) -> bool:
        """See `Completer.follows`. With experts it is computed: it decides which other tokens its experts get."""
        several = prompt.written_ids
        if several is None or len(several) != prompt.params.n or self._llm.has_experts:
            return False
        return all(min(ids, default=0) >= 0 and max(ids, default=0) < self._llm.vocab_size for ids in several)

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        """Simulate some rows, evenly spread, and extrapolate: simulating all of them would take long."""
        fitting = [each for each in prompts if self._llm.fits(len(each.token_ids), each.max_new_tokens)]
        if any(map(self.follows, fitting)):
            return self._forecast_rest(fitting)
        count = min(len(fitting), _MOST_SIMULATED)
        spread = (fitting[number * len(fitting) // count] for number in range(count))
        sequences = [prompt for prompt in spread for _ in range(prompt.params.n)]
        if not sequences:
            return Forecast("nothing, since no row of the first batch fits the KV cache")
        prompt_lens = [len(each.token_ids) for each in sequences]
        simulated = self._llm.predict(prompt_lens, [each.max_new_tokens for each in sequences])
        predicted = simulated.repeated(len(fitting) / count)
        text = f"{predicted} for {sum(each.params.n for each in fitting):,} sequences"
        return Forecast(text, predicted.tokens_per_s, predicted.seconds, predicted.num_passes)

    def _forecast_rest(self, prompts: Sequence[Prompt]) -> Forecast:
        """Simulate all rows that share passes, of which some are written."""
        prompt_lens, new_tokens, missing = list[int](), list[int](), set[int]()
        for each in prompts:
            if self.follows(each):
                new_tokens += [max(len(ids), 1) for ids in each.written_ids or ()]
            else:
                missing.update(range(len(prompt_lens), len(prompt_lens) + each.params.n))
                new_tokens += [each.max_new_tokens] * each.params.n
            prompt_lens += [len(each.token_ids)] * each.params.n
        if not missing:
            return Forecast("nothing, since no missing row of the first batch fits the KV cache")
        predicted = self._llm.predict_rest(prompt_lens, new_tokens, missing)
        text = f"{predicted} for {len(missing):,} missing of {len(prompt_lens):,} sequences"
        return Forecast(text, predicted.tokens_per_s, predicted.seconds, predicted.num_passes)

    def choose_batch_size(self, prompts: Sequence[Prompt]) -> int:
        """Halve a batch that would be computed again until it takes ten minutes, unless that lowers the throughput."""
        if self.most_under_way is not None:
            return ROWS_TOGETHER
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
        """See `Completer.complete`. All prompts that are not followed are computed, since they share passes."""
        self._llm.reset_prefix_cache()
        found: defaultdict[int, list[Completion]] = defaultdict(list)
        before = self._llm.num_new_tokens
        token_ids = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        known = {number: each.written_ids for number, each in enumerate(prompts) if self.follows(each)}
        with closing(self._llm.stream(token_ids, [prompt.params for prompt in prompts], known=known)) as stream:
            for completion in stream:
                index = completion.prompt_index
                found[index].append(completion)
                if len(found[index]) == prompts[index].params.n:
                    yield prompts[index], tuple(sorted(found.pop(index), key=lambda each: each.sample_index))
        self._rehearsal.note_passes()
        if self._llm.num_new_tokens > before and not self._llm.is_following:
            predicted = self._llm.predict_passes()
            self.predicted_s += predicted.seconds
            self.launching_s += predicted.seconds if predicted.bottleneck == LAUNCHING else 0.0
