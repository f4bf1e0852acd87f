"""Times candidate tiles of a kernel against each other."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from device_clock import Call, graph_seconds
from triton.runtime.errors import OutOfResources

_COMPILERS: Final = 12  # threads


def race(name: str, tried: Mapping[Any, Sequence[Call]]) -> dict[Any, float]:
    """Seconds of each that runs; prints the three fastest."""
    runs = dict(zip(tried, compiled([calls[0] for calls in tried.values()]), strict=True))
    found = {tiles: graph_seconds(calls, replays=7) for tiles, calls in tried.items() if runs[tiles]}
    for tiles in sorted(found, key=lambda tiles: found[tiles])[:3]:
        print(f"{name}: {found[tiles] * 1e6:8.2f} us {tiles}", flush=True)
    return found


def compiled(calls: Sequence[Call]) -> list[bool]:
    """Whether each fits the device, after they were compiled side by side."""
    with ThreadPoolExecutor(_COMPILERS) as pool:
        runs = list(pool.map(_runs, calls))
    torch.cuda.synchronize()
    return runs


def _runs(call: Call) -> bool:
    """Whether a kernel fits the device; compiles it."""
    try:
        call()
    except OutOfResources:
        return False
    return True


def least(times: Mapping[Any, Sequence[float]]) -> Any:
    """The key with the least geometric mean, of those that ran everywhere."""
    most = max(map(len, times.values()))
    return min(
        (tiles for tiles in times if len(times[tiles]) == most), key=lambda tiles: sum(map(math.log, times[tiles]))
    )
