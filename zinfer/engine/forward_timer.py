"""Times each forward call of a model, as DeepSpeed's `profile_model_time` does."""

import time
from typing import Any

import torch
from torch import nn

Moment = float | torch.cuda.Event


class PassTimes:
    """Times every forward call of ``model`` that returns, until `remove`.

    Args:
        device: where it computes.
        use_cuda_events: record CUDA events, which delay nothing; False: synchronize before and after each call.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, use_cuda_events: bool) -> None:
        self._device = device
        self._use_events = use_cuda_events and device.type == "cuda"
        self._begin: Moment | None = None
        self._spans: list[tuple[Moment, Moment]] = []
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def take(self) -> list[float]:
        """Return the milliseconds of each call since the last `take`; waits until the device has computed them."""
        spans, self._spans = self._spans, []
        return [_milliseconds(begin, end) for begin, end in spans]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._begin = self._now()

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._begin is not None:  # None: the hooks were added during this call
            self._spans.append((self._begin, self._now()))

    def _now(self) -> Moment:
        if self._use_events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _milliseconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end))
    assert isinstance(end, float)
    return (end - begin) * 1e3
