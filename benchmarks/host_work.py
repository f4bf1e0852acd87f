"""Measures the host's work for the passes of a job, and how long the device idles between two of them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from zinfer.batching.batcher import Batcher
from zinfer.batching.runner import PassRunner
from zinfer.sampling.async_copy import DeviceToHostCopy
from zinfer.sampling.sampler import Sampler
from zinfer.scheduling.schedule import PassSize


class HostWork:
    """Times every pass while it is `watched`.

    The host's work is all of a step (scheduling, the pass's tensors, drawing, taking tokens) but the wait for the
    tokens of the pass before and the call of the model. The device rests from the end of a pass's draws to the first
    kernel of the next, which includes the copy of the next pass's numbers.
    """

    def __init__(self) -> None:
        self._host_s: list[float] = []
        self._away_s = 0.0
        self._begins: list[torch.cuda.Event] = []
        self._ends: list[torch.cuda.Event] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time while the context lasts."""
        with ExitStack() as stack:
            for owner, name, timed in (
                (Batcher, "step", self._step),
                (DeviceToHostCopy, "take", self._away),
                (PassRunner, "run", self._run),
                (Sampler, "draw", self._draw),
            ):
                stack.enter_context(mock.patch.object(owner, name, _wrapped(getattr(owner, name), timed)))
            yield

    def figures(self, sizes: Sequence[PassSize]) -> dict[str, float]:
        """Milliseconds of the host for a pass, median and 95th percentile over those with nearly the most texts, and
        of the device's rest between two passes, median and most, and its seconds in all.

        Args:
            sizes: of the passes that were watched, in order, the first left out.
        """
        most = max(size.num_samples for size in sizes)
        crowded = [place for place, size in enumerate(sizes) if size.num_samples > 0.9 * most]
        host_ms = [self._host_s[1 + place] * 1e3 for place in crowded]
        found = {
            "host_ms": statistics.median(host_ms),
            "host_ms_p95": sorted(host_ms)[int(0.95 * (len(host_ms) - 1))],
            "texts_then": statistics.median(sizes[place].num_samples for place in crowded),
        }
        if self._ends:
            torch.cuda.synchronize()
            rests = [end.elapsed_time(begin) for end, begin in zip(self._ends, self._begins[1:], strict=False)]
            found |= {"rest_ms": statistics.median(rests), "most_rest_ms": max(rests), "rest_s": sum(rests) / 1e3}
        return {name: round(value, 3) for name, value in found.items()}

    def _step(self, call: Callable[[], Any]) -> Any:
        begin_s, self._away_s = time.perf_counter(), 0.0
        result = call()
        self._host_s.append(time.perf_counter() - begin_s - self._away_s)
        return result

    def _away(self, call: Callable[[], Any]) -> Any:
        begin_s = time.perf_counter()
        result = call()
        self._away_s += time.perf_counter() - begin_s
        return result

    def _run(self, call: Callable[[], Any]) -> Any:
        _mark(self._begins)
        return self._away(call)

    def _draw(self, call: Callable[[], Any]) -> Any:
        result = call()
        _mark(self._ends)
        return result


def _wrapped(original: Callable[..., Any], timed: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: timed(lambda: original(*args, **kwargs))


def _mark(marks: list[torch.cuda.Event]) -> None:
    if torch.cuda.is_available():
        marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        marks[-1].record()
