"""Sweeps a disk and prints GB/s, and a `Reader`'s rate for a whole file, as a share of the best point.

    python benchmarks/disk.py [--folder . --gb 12 --seconds 1.0] [--out FILE]

Writes a file of random bytes to the folder and deletes it at the end. First it checks that the bytes read have the
checksum of the bytes written. "Sustained" is a `Reader` with default settings that reads the whole file in requests of
16 MiB, 8 of them queued at any time. The last line is JSON.
"""

import argparse
import json
import os
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from result import publish

from zinfer.nvme.memory import map_memory
from zinfer.nvme.reader import Reader
from zinfer.probe.disk import DiskFindings, DiskRate, aio_section, sweep_reads, sweep_writes
from zinfer.probe.sizes import FULL_CPU

REQUEST_BYTES = 16 << 20
NUM_REQUESTS = 8


def write_random(path: Path, num_requests: int) -> int:
    """Write that many requests' bytes and return their checksum."""
    generator, checksum = np.random.default_rng(0), 0
    with path.open("wb", buffering=0) as file:
        for _ in range(num_requests):
            part = generator.bytes(REQUEST_BYTES)
            checksum = zlib.crc32(part, checksum)
            file.write(part)
        os.fsync(file.fileno())
    return checksum


def stream_s(reader: Reader, path: Path, consume: Callable[[memoryview], None]) -> float:
    """Seconds of reading the whole file in order, with 8 requests waiting at any time."""
    memory = memoryview(map_memory(NUM_REQUESTS * REQUEST_BYTES))
    memory[:] = bytes(memory.nbytes)
    slots = [memory[begin : begin + REQUEST_BYTES] for begin in range(0, memory.nbytes, REQUEST_BYTES)]
    offsets = iter(range(0, path.stat().st_size, REQUEST_BYTES))
    begin_s = time.perf_counter()
    waiting = deque((reader.read_async(path, offset, slot), slot) for slot, offset in zip(slots, offsets, strict=False))
    while waiting:
        request, slot = waiting.popleft()
        request.result()
        consume(slot)
        offset = next(offsets, None)
        if offset is not None:
            waiting.append((reader.read_async(path, offset, slot), slot))
    return time.perf_counter() - begin_s


def check_bytes(path: Path, expected: int) -> None:
    """The gate: what is read is what was written."""
    checksum = 0

    def add(part: memoryview) -> None:
        nonlocal checksum
        checksum = zlib.crc32(part, checksum)

    with closing(Reader(uses_cache=False)) as reader:
        stream_s(reader, path, add)
    if checksum != expected:
        raise SystemExit("gate: the bytes read are not the bytes written; no figure is reported")


def print_table(rates: Sequence[DiskRate]) -> None:
    print(f"{'':6} {'block MiB':>9} {'at once':>7} {'GB/s':>6}")
    for rate in rates:
        cached = "" if rate.direct else "  (page cache)"
        row = (
            f"{rate.operation:6} {rate.block_bytes / (1 << 20):9.0f} {rate.num_threads:7} {rate.bytes_per_s / 1e9:6.2f}"
        )
        print(row + cached)


def measure(path: Path, seconds: float) -> dict[str, object]:
    """The sweeps, and the sustained rate: before and after them, the better of the two."""
    num_bytes, sizes = path.stat().st_size, replace(FULL_CPU, seconds_per_point=seconds)
    with closing(Reader(uses_cache=False)) as reader:
        sustained_s = stream_s(reader, path, lambda part: None)
        rates = sweep_reads(path, sizes)
        sustained_s = min(sustained_s, stream_s(reader, path, lambda part: None))
        direct = not reader.buffered_files
    rates += sweep_writes(path, sizes)
    print_table(rates)
    found = DiskFindings(str(path), path.stat().st_dev, tuple(rates))
    read, write = found.best("read"), found.best("write")
    assert read is not None
    assert write is not None
    print(f"best read: {json.dumps(aio_section(read))}")
    sustained = num_bytes / sustained_s
    return {
        "read_gb_per_s": round(read.bytes_per_s / 1e9, 3),
        "write_gb_per_s": round(write.bytes_per_s / 1e9, 3),
        "sustained_gb_per_s": round(sustained / 1e9, 3),
        "sustained_share_of_best": round(sustained / read.bytes_per_s, 4),
        "sustained_direct": direct,
        "best": [asdict(read), asdict(write)],
        "rates": [asdict(rate) for rate in rates],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--gb", type=float, default=12)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each point of the sweeps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_requests = max(NUM_REQUESTS, round(args.gb * 1e9 / REQUEST_BYTES))
    with tempfile.TemporaryDirectory(prefix="zinfer-disk-", dir=args.folder) as folder:
        path = Path(folder) / "random.bin"
        check_bytes(path, write_random(path, num_requests))
        figures = measure(path, args.seconds)
    work = {"benchmark": "disk", "gb": round(num_requests * REQUEST_BYTES / 1e9, 3), "seconds": args.seconds}
    publish(work | figures, args.out)


if __name__ == "__main__":
    main()
