"""Measures the ceilings that streaming figures are shares of, in the same run."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path

import torch

from zinfer.nvme.aligned import align_up
from zinfer.nvme.reader import Reader
from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.measure import median_seconds

# (bytes of a request, requests under way): the best of a wide sweep lie among these.
DISK_SETTINGS = ((1 << 20, 32), (4 << 20, 16), (4 << 20, 32))
PLAIN_BYTES = 4 << 30  # about a second's
_RANGE_BYTES = 16 << 20
_NUM_RANGES = 16


def link_bytes_per_s(nbytes: int, device: torch.device, repeats: int = 5) -> float:
    """Host-to-device copies of one block's size, back to back over two targets, from pinned memory."""
    host = HostBuffer(nbytes, pin=device.type == "cuda")
    targets = [torch.empty(host.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def copy() -> None:
        for count in range(8):
            targets[count % 2].copy_(host.tensor, non_blocking=True)

    seconds = median_seconds(copy, [device], repeats=repeats)
    host.close()
    return 8 * host.nbytes / seconds


class PlainReads:
    """Direct reads of files with nothing else to do: what a pass from disk is a share of.

    Each measurement goes on in the files where the one before it stopped, round and round.

    Args:
        setting: bytes of a request, and requests under way.
    """

    def __init__(self, files: Sequence[Path], setting: tuple[int, int]) -> None:
        self._setting = setting
        ranges = [
            (path, offset, min(_RANGE_BYTES, path.stat().st_size - offset))
            for path in files
            for offset in range(0, path.stat().st_size, _RANGE_BYTES)
        ]
        self._num_ranges = len(ranges)
        self._walk = cycle(ranges)

    def bytes_per_s(self, most_bytes: int = PLAIN_BYTES) -> float:
        """Read about ``most_bytes``, all the files once at the most."""
        block_bytes, num_threads = self._setting
        count = min(self._num_ranges, most_bytes // _RANGE_BYTES)
        buffer = HostBuffer(_RANGE_BYTES * _NUM_RANGES, pin=torch.cuda.is_available())
        under_way: deque[Future[None]] = deque()
        nbytes = 0
        with closing(Reader(num_threads=num_threads, block_bytes=block_bytes, uses_cache=False)) as reader:
            begin_s = time.perf_counter()
            for number, (path, offset, size) in enumerate(islice(self._walk, max(count, 1))):
                if len(under_way) == _NUM_RANGES:
                    under_way.popleft().result()
                begin = number % _NUM_RANGES * _RANGE_BYTES
                under_way.append(reader.read_async(path, offset, buffer.memory[begin : begin + align_up(size)], size))
                nbytes += size
            for read in under_way:
                read.result()
            rate = nbytes / (time.perf_counter() - begin_s)
        buffer.close()
        return rate


def best_disk_setting(files: Sequence[Path]) -> tuple[int, int]:
    """The setting that reads the files the fastest."""
    rates = {setting: PlainReads(files, setting).bytes_per_s() for setting in DISK_SETTINGS}
    for (block_bytes, num_threads), rate in rates.items():
        print(f"disk: {num_threads:2} x {block_bytes >> 20:2} MiB: {rate / 1e9:.2f} GB/s", flush=True)
    return max(rates, key=lambda setting: rates[setting])


def pin_bytes_per_s(sizes: Sequence[int]) -> float:
    """Touch and register one buffer after the other, as loading does, with nothing else to do.

    As many bytes as are loaded: the first gigabytes come faster than those that a hypervisor has to find.
    """
    buffers: list[HostBuffer] = []
    begin_s = time.perf_counter()
    for nbytes in sizes:
        buffers.append(HostBuffer(nbytes))
        buffers[-1].touch()
        buffers[-1].pin()
    rate = sum(buffer.nbytes for buffer in buffers) / (time.perf_counter() - begin_s)
    for buffer in buffers:
        buffer.close()
    return rate
