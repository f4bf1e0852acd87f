"""Prometheus metrics of requests: vLLM's names where vLLM has the same, `zinfer:` before the others."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from zinfer.requests.completion import CompletionDelta
from zinfer.serve.prompts import Encoded
from zinfer.serve.replica import Replica
from zinfer.serve.replica_metrics import ENGINE, ReplicaMetrics

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

# Passes over streamed weights take seconds: the buckets go further than those of a resident model.
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKENS: Final = (1, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """The metrics of one server; those of requests have the replica that computes them as `engine`.

    Args:
        model_name: label of all metrics.
        replicas: whose counters are shown.

    Attributes:
        num_refused: calls that got 429.
        num_under_way: sequences of requests that were not answered yet.
    """

    def __init__(self, model_name: str, replicas: Sequence[Replica]) -> None:
        self._registry = registry = CollectorRegistry()
        help = "Calls refused because too many were under way."
        self.num_refused = Counter("zinfer:requests_refused", help, ENGINE[:1], registry=registry).labels(model_name)
        kinds = _Kinds(registry)
        self._engines = [_Engine(kinds, model_name, str(each.index)) for each in replicas]
        self.num_under_way = 0
        self.add(ReplicaMetrics(model_name, replicas))

    def add(self, collector: "Collector") -> None:
        """Show what a collector has, too."""
        self._registry.register(collector)

    @contextmanager
    def request(self, encoded: Encoded) -> Iterator["MeasuredRequest"]:
        """Measure a request while it is under way."""
        self.num_under_way += encoded.params.n
        measured = MeasuredRequest(self._engines, len(encoded.prompt_ids))
        try:
            yield measured
        finally:
            self.num_under_way -= encoded.params.n
            measured.end()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Kinds:
    """The kinds of metrics that all replicas have."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, help: str) -> Histogram:
            return Histogram(name, f"Seconds. {help}", ENGINE, registry=registry, buckets=_SECONDS)

        def tokens(name: str, help: str) -> Histogram:
            return Histogram(name, help, ENGINE, registry=registry, buckets=_TOKENS)

        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of requests.", ENGINE, registry=registry)
        self.new_tokens = Counter("vllm:generation_tokens", "Tokens generated.", ENGINE, registry=registry)
        self.ended = Counter(
            "vllm:request_success", "Sequences that ended.", (*ENGINE, "finished_reason"), registry=registry
        )
        self.first = seconds("vllm:time_to_first_token_seconds", "Until a sequence's first token.")
        self.between = seconds("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.")
        self.whole = seconds("vllm:e2e_request_latency_seconds", "Of a whole request.")
        self.prompt_lens = tokens("vllm:request_prompt_tokens", "Prompt tokens of a request.")
        self.new_lens = tokens("vllm:request_generation_tokens", "Tokens generated for a sequence.")


class _Engine:
    """One replica's metrics: looking them up by their labels for each token is slow."""

    def __init__(self, kinds: _Kinds, *labels: str) -> None:
        self.prompt_tokens, self.new_tokens = kinds.prompt_tokens.labels(*labels), kinds.new_tokens.labels(*labels)
        self.first, self.between = kinds.first.labels(*labels), kinds.between.labels(*labels)
        self.whole = kinds.whole.labels(*labels)
        self.prompt_lens, self.new_lens = kinds.prompt_lens.labels(*labels), kinds.new_lens.labels(*labels)
        self._ended, self._labels = kinds.ended, labels
        for reason in ("stop", "length"):
            kinds.ended.labels(*labels, reason)

    def note_end(self, reason: str, num_tokens: int) -> None:
        self.new_lens.observe(num_tokens)
        self._ended.labels(*self._labels, reason).inc()


class MeasuredRequest:
    """The times of one request's tokens."""

    def __init__(self, engines: Sequence[_Engine], prompt_len: int) -> None:
        self._engines, self._prompt_len = engines, prompt_len
        self._began_s = time.monotonic()
        self._last_s: dict[int, float] = {}
        self._engine: _Engine | None = None

    def begin(self, replica: int) -> None:
        """Note the replica that the request is sent to; again if another one takes it."""
        is_first, self._engine = self._engine is None, self._engines[replica]
        if is_first:
            self._engine.prompt_tokens.inc(self._prompt_len)
            self._engine.prompt_lens.observe(self._prompt_len)

    def add(self, delta: CompletionDelta) -> None:
        """Note an increment that has just come."""
        engine, sample = self._engine, delta.sample_index
        assert engine is not None
        if num_tokens := len(delta.token_ids):
            now_s, before_s = time.monotonic(), self._last_s.get(sample)
            if before_s is None:
                engine.first.observe(now_s - self._began_s)
            for place in range(before_s is None, num_tokens):  # of several the first has come after the one before
                engine.between.observe(now_s - before_s if place == 0 and before_s is not None else 0.0)
            engine.new_tokens.inc(num_tokens)
            self._last_s[sample] = now_s
        if delta.completion is not None:
            engine.note_end(delta.completion.finish_reason, len(delta.completion.token_ids))

    def end(self) -> None:
        """Note that the request was answered, or given up."""
        if self._engine is not None:
            self._engine.whole.observe(time.monotonic() - self._began_s)
