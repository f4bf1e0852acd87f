"""Prometheus metrics of a server: vLLM's names where vLLM has the same, `zinfer_` before the others."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zinfer.requests.completion import CompletionDelta
from zinfer.serve.replica import Replica

if TYPE_CHECKING:
    from zinfer.serve.service import Encoded

# Passes over streamed weights take seconds: the buckets go further than those of a resident model.
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_LABEL: Final = ("model_name",)


class Metrics:
    """The metrics of one server.

    Args:
        model_name: label of all metrics.
        replicas: whose counters are shown.

    Attributes:
        num_refused: calls that got 429.
    """

    def __init__(self, model_name: str, replicas: Sequence[Replica]) -> None:
        self._registry = CollectorRegistry()
        self._name = model_name
        self.num_refused = self._counter("zinfer_requests_refused", "Calls refused because too many were under way.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self._new_tokens = self._counter("vllm:generation_tokens", "Tokens generated for requests.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Seconds until a request's first token.")
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Seconds between two tokens of a sequence.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Seconds of a whole request.")
        self._success = Counter(
            "vllm:request_success", "Sequences that ended.", (*_LABEL, "finished_reason"), registry=self._registry
        )
        self.num_under_way = 0
        self._registry.register(_ReplicaCounters(self, model_name, replicas))

    @contextmanager
    def request(self, encoded: "Encoded") -> Iterator["MeasuredRequest"]:
        """Measure a request while it is under way."""
        self._prompt_tokens.inc(len(encoded.prompt_ids))
        self.num_under_way += encoded.params.n
        measured = MeasuredRequest(self)
        try:
            yield measured
        finally:
            self.num_under_way -= encoded.params.n
            self._whole.observe(time.monotonic() - measured.began_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def note(self, delta: CompletionDelta, elapsed_s: float, *, is_first: bool) -> None:
        """Count an increment that came this long after the one before it."""
        self._new_tokens.inc(len(delta.token_ids))
        if delta.token_ids:
            (self._first if is_first else self._between).observe(elapsed_s)
        if delta.completion is not None:
            self._success.labels(self._name, delta.completion.finish_reason).inc()

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, _LABEL, registry=self._registry).labels(self._name)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, _LABEL, registry=self._registry, buckets=_SECONDS).labels(self._name)


class MeasuredRequest:
    """The times of one request's tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self.began_s = time.monotonic()
        self._metrics = metrics
        self._last_s: dict[int, float] = {}

    def add(self, delta: CompletionDelta) -> None:
        """Note an increment that has just come."""
        now_s, sample = time.monotonic(), delta.sample_index
        before_s = self._last_s.get(sample, self.began_s)
        self._metrics.note(delta, now_s - before_s, is_first=sample not in self._last_s)
        self._last_s[sample] = now_s


class _ReplicaCounters(Collector):
    """Shows what the replicas last reported."""

    def __init__(self, metrics: Metrics, model_name: str, replicas: Sequence[Replica]) -> None:
        self._metrics, self._name, self._replicas = metrics, model_name, replicas

    def collect(self) -> Iterable[Metric]:
        num_running = sum(each.load.num_running for each in self._replicas if each.load is not None)
        waiting = max(0, self._metrics.num_under_way - num_running)
        for name, help, value in (
            ("vllm:num_requests_running", "Sequences that hold pages of the KV cache.", num_running),
            ("vllm:num_requests_waiting", "Sequences that wait for pages.", waiting),
        ):
            gauge = GaugeMetricFamily(name, help, labels=_LABEL)
            gauge.add_metric((self._name,), value)
            yield gauge
        labels = (*_LABEL, "replica")
        passes = CounterMetricFamily("zinfer_passes", "Passes over the model's weights.", labels=labels)
        restarts = CounterMetricFamily("zinfer_replica_restarts", "Times that a replica was restarted.", labels=labels)
        shares = GaugeMetricFamily(
            "zinfer_share", "Streamed bytes as a share of the known rate.", labels=(*labels, "of")
        )
        stalls = CounterMetricFamily("zinfer_stall_seconds", "Seconds waited, by cause.", labels=(*labels, "cause"))
        for each in self._replicas:
            own = (self._name, str(each.index))
            restarts.add_metric(own, each.num_restarts)
            if (load := each.load) is None:
                continue
            passes.add_metric(own, load.num_passes)
            for what, share in (("link", load.link_share), ("disk", load.disk_share)):
                if share is not None:
                    shares.add_metric((*own, what), share)
            for cause, seconds in load.stall_s.items():
                stalls.add_metric((*own, cause), seconds)
        yield from (passes, restarts, shares, stalls)
