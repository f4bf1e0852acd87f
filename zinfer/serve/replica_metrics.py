"""Prometheus metrics of replicas and batches: what their processes last reported."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zinfer.batching.pass_meter import SECONDS, TOKENS
from zinfer.serve.messages import Counts, Load
from zinfer.serve.replica import Replica

ENGINE: Final = ("model_name", "engine")
_REPLICA: Final = ("model_name", "replica")


class ReplicaMetrics(Collector):
    """Shows the counters of replicas."""

    def __init__(self, model_name: str, replicas: Sequence[Replica]) -> None:
        self._name, self._replicas = model_name, replicas

    def collect(self) -> Iterable[Metric]:
        families = _Families(self._name)
        for each in self._replicas:
            families.at(each.index)
            families.gauge("vllm:num_requests_waiting", "Sequences that wait for pages.", each.num_waiting, ENGINE)
            families.gauge("zinfer:background_sequences", "Of batches, sent to a replica.", each.num_background)
            families.gauge("zinfer:outstanding_tokens", "Tokens that requests may still need.", each.outstanding)
            families.gauge("zinfer:replica_ready", "1: takes requests.", int(each.ready is not None))
            families.counter("zinfer:replica_restarts", "Times that a replica was restarted.", each.num_restarts)
            if each.load is not None:
                _add_load(families, each.load)
        yield from families


def _add_load(families: "_Families", load: Load) -> None:
    """Add what a replica has reported."""
    families.gauge("vllm:num_requests_running", "Sequences that hold pages.", load.num_running, ENGINE)
    usage = load.num_used_pages / load.num_pages
    families.gauge("vllm:kv_cache_usage_perc", "Share of the pages that are held; 1: all.", usage, ENGINE)
    families.histogram("vllm:iteration_tokens_total", "Tokens of a pass.", load.pass_tokens, TOKENS, ENGINE)
    families.histogram("zinfer:pass_seconds", "Seconds of a pass.", load.pass_seconds, SECONDS, _REPLICA)
    for state, number in (("used", load.num_used_pages), ("swapped", load.num_swapped_pages), ("all", load.num_pages)):
        families.gauge("zinfer:kv_pages", "Pages of the KV cache.", number, state=state)
    families.gauge("zinfer:pass_rows", "Sequences that passes compute a token of.", load.num_running)
    families.counter("zinfer:computed_tokens", "Tokens that passes computed.", load.num_tokens)
    families.counter("zinfer:generated_tokens", "Tokens generated, of batches too.", load.num_new_tokens)
    families.gauge("zinfer:free_tokens", "Tokens of a pass that its streaming leaves time for.", load.free_tokens)
    families.counter("zinfer:unused_free_tokens", "Free tokens that passes did not use.", load.num_unused_tokens)
    for path, share in load.shares.items():
        families.gauge("zinfer:transfer_share", "Of the known rate, in the last second.", share, of=path)
    for path, nbytes in load.moved_bytes.items():
        families.counter("zinfer:transferred_bytes", "Bytes over link or disk.", nbytes, of=path)
    for cause, seconds in load.stall_s.items():
        families.counter("zinfer:stall_seconds", "Seconds waited, by cause.", seconds, cause=cause)


class BatchMetrics(Collector):
    """Shows the rows of the batch under way, and how many batches wait.

    Args:
        state: returns the number of unfinished batches, and the counts of the rows of the one under way.
    """

    def __init__(self, model_name: str, state: Any) -> None:
        self._name, self._state = model_name, state

    def collect(self) -> Iterable[Metric]:
        num_unfinished, counts = self._state()
        unfinished = GaugeMetricFamily("zinfer:unfinished_batches", "Batches that have not ended.", labels=ENGINE[:1])
        unfinished.add_metric((self._name,), num_unfinished)
        rows = GaugeMetricFamily("zinfer:batch_rows", "Rows of the batch under way.", labels=(*ENGINE[:1], "state"))
        for state, number in counts.items():
            rows.add_metric((self._name, state), number)
        yield from (unfinished, rows)


class _Families:
    """Metrics by name; the values of a replica are added one after the other."""

    def __init__(self, model_name: str) -> None:
        self._families: dict[str, Any] = {}
        self._own = (model_name, "")

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())

    def at(self, index: int) -> None:
        """Add the values of this replica from now on."""
        self._own = (self._own[0], str(index))

    def gauge(self, name: str, help: str, value: float, labels: Sequence[str] = _REPLICA, **more: str) -> None:
        self._of(GaugeMetricFamily, name, help, (*labels, *more)).add_metric((*self._own, *more.values()), value)

    def counter(self, name: str, help: str, value: float, **more: str) -> None:
        self._of(CounterMetricFamily, name, help, (*_REPLICA, *more)).add_metric((*self._own, *more.values()), value)

    def histogram(self, name: str, help: str, found: Counts, bounds: Sequence[float], labels: Sequence[str]) -> None:
        names = [*(str(float(each)) for each in bounds), "+Inf"]
        buckets = list(zip(names, accumulate(found.counts), strict=True))
        self._of(HistogramMetricFamily, name, help, labels).add_metric(self._own, buckets, found.total)

    def _of(self, kind: Any, name: str, help: str, labels: Sequence[str]) -> Any:
        if name not in self._families:
            self._families[name] = kind(name, help, labels=labels)
        return self._families[name]
