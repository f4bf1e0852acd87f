"""Takes times: the median of several runs, with the devices idle before and after each."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from pydantic import Field

PerSecond = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A measured rate: positive and finite."""


def settle(devices: Sequence[torch.device]) -> None:
    """Return when everything that was enqueued on the devices is done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def median_seconds(work: Callable[[], object], devices: Sequence[torch.device] = (), *, repeats: int) -> float:
    """Seconds of one call, the median of ``repeats`` after one that is not counted."""
    work()
    seconds = []
    for _ in range(repeats):
        settle(devices)
        begin_s = time.perf_counter()
        work()
        settle(devices)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)
