"""What a job did over time, looked at now and then by a thread of its own, so that the computing waits for nothing."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from zinfer.offload.stats import RunStats

_MOST_MOMENTS: Final = 2000
_INTERVAL_S: Final = 0.25


@dataclass(frozen=True)
class Load:
    """What passes carried so far, and now.

    Attributes:
        num_tokens: computed, of prompts and of what came after.
        num_new_tokens: generated.
        num_running: sequences that hold KV-cache pages.
        num_swapped_pages: of preempted sequences, in host memory or on the disk.
    """

    num_tokens: int
    num_new_tokens: int
    num_running: int
    num_swapped_pages: int = 0


@dataclass(frozen=True)
class Moment:
    """The counters at one time.

    Attributes:
        at_s: since the first moment.
        load: of the passes.
        passes: walks over the weights.
        link_s, disk_s: seconds that what was moved takes at the measured rates; None before these are known.
        stall_s: as `RunStats.stall_s`.
    """

    at_s: float
    load: Load
    passes: int
    link_s: float | None
    disk_s: float | None
    stall_s: dict[str, float] = field(default_factory=dict)


class Timeline:
    """Takes moments until it is closed; an endless job gets no more of them, they lie further apart.

    Args:
        stats, load: asked for the counters, by the thread of the timeline.
    """

    def __init__(
        self, stats: Callable[[], RunStats], load: Callable[[], Load], interval_s: float = _INTERVAL_S
    ) -> None:
        self._stats = stats
        self._load = load
        self._interval_s = interval_s
        self._began_s = time.monotonic()
        self.moments: list[Moment] = []
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="zinfer-timeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the last moment; raises what went wrong in taking others. May be called again."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._take()
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        try:
            self._take()
            while not self._ended.wait(self._interval_s):
                self._take()
                if len(self.moments) >= _MOST_MOMENTS:
                    self.moments = self.moments[::2]
                    self._interval_s *= 2
        except BaseException as failure:  # raised by close
            self._failure = failure

    def _take(self) -> None:
        stats, load = self._stats(), self._load()
        link_s = None if stats.link_share is None else stats.link_share * stats.span_s
        disk_s = None if stats.disk_share is None else stats.disk_share * stats.span_s
        at_s = time.monotonic() - self._began_s
        self.moments.append(Moment(at_s, load, stats.passes, link_s, disk_s, dict(stats.stall_s)))
