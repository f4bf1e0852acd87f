"""`EngineReport`: what a process that computes tells the server about once a second."""

import time
from typing import Final

from zinfer.batching.llm import LLM
from zinfer.batching.pass_meter import Histogram
from zinfer.offload.stats import RunStats
from zinfer.serve.messages import Counts, Load

_LEAST_S: Final = 1e-3


class EngineReport:
    """Makes `Load` messages of one model; shares are those of the time since the message before.

    Args:
        llm: open; rates of the link and the disk are measured if they are not known and weights stream.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._meter = llm.measure_passes()
        self._busy_s: dict[str, float] = {}
        self._looked_s = time.perf_counter()

    def make(self) -> Load:
        """Return the present counters. Raises RuntimeError if the model was closed."""
        llm, meter, stats = self._llm, self._meter, self._llm.stats()
        return Load(
            num_running=llm.num_running,
            num_background=llm.num_background,
            num_pages=llm.batching.num_pages,
            num_used_pages=llm.num_used_pages,
            num_swapped_pages=llm.num_swapped_pages,
            num_tokens=llm.num_tokens,
            num_new_tokens=llm.num_new_tokens,
            free_tokens=meter.free_tokens,
            num_unused_tokens=meter.num_unused,
            pass_seconds=_counts(meter.seconds),
            pass_tokens=_counts(meter.tokens),
            shares=self._shares(stats),
            stall_s=stats.stall_s,
            moved_bytes={"link": stats.bytes_to_device, "disk": stats.bytes_read_disk},
            blocks=stats.blocks_by_home,
            memory_bytes={"device": stats.device_bytes, "host": stats.host_bytes, "kv_cache": llm.batching.kv_bytes},
            streamed_bytes=stats.streamed_bytes_per_pass,
        )

    def _shares(self, stats: RunStats) -> dict[str, float]:
        """Return the shares of the known rates that were used since the last call; 0 where nothing streams."""
        now_s = time.perf_counter()
        elapsed_s, self._looked_s = max(now_s - self._looked_s, _LEAST_S), now_s
        whole = {"link": stats.link_share or 0.0, "disk": stats.disk_share or 0.0}
        busy_s = {name: share * stats.span_s for name, share in whole.items()}
        shares = {name: max(each - self._busy_s.get(name, 0.0), 0.0) / elapsed_s for name, each in busy_s.items()}
        self._busy_s = busy_s
        return shares


def _counts(histogram: Histogram) -> Counts:
    return Counts(list(histogram.counts), histogram.total)
