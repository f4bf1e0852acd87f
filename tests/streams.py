"""Copy streams whose copies start after random delays, to expose races that fast copies would hide."""

import random
import time

import torch

from zinfer.offload.stream import CopyStream, CudaStream, HostStream


class LateHostStream(HostStream):
    """Each copy first lets other threads run ahead, then moves its bytes in two halves."""

    def __init__(self, seed: int, longest_s: float = 0.002) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._longest_s = longest_s

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.dtype != source.dtype or target.numel() < 2:
            time.sleep(self._random.uniform(0, self._longest_s))
            super().copy(target, source)
            return
        half = target.numel() // 2
        for part in (slice(None, half), slice(half, None)):
            time.sleep(self._random.uniform(0, self._longest_s))
            super().copy(target[part], source[part])


class LateCudaStream(CudaStream):
    """The copy stream idles for up to a millisecond before each copy."""

    def __init__(self, device: torch.device, seed: int, longest_cycles: int = 2_000_000) -> None:
        super().__init__(device)
        self._random = random.Random(seed)
        self._longest_cycles = longest_cycles

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._random.randrange(self._longest_cycles))  # type: ignore[no-untyped-call]
        super().copy(target, source)


def late_stream(device: str, seed: int) -> CopyStream:
    return LateCudaStream(torch.device("cuda", 0), seed) if device == "cuda" else LateHostStream(seed)
