"""Makes the slabs of a store one by one, and writes each while the next ones are read and converted.

Two slabs in host memory alternate. Blocks that need no conversion are read into them directly; others pass through two
slots on the device first. The two kinds are processed separately, so that neither waits for a slab of the other.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import torch
from rich.console import Console
from rich.table import Table

from zinfer.display import Progress
from zinfer.errors import PlanError
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.pool import Pool
from zinfer.nvme.reader import Reader, ReadObserver
from zinfer.offload.block import Block, conversion_bytes
from zinfer.offload.conversions import Conversions
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.source import DiskSource
from zinfer.offload.staging import StagingRing
from zinfer.offload.stream import HostStream, drain, open_stream
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import TransferLane
from zinfer.units import clock, duration, human_bytes


class Meter(Progress):
    """The progress of a store.

    Attributes:
        read_bytes: returns the bytes read by this run; margins of aligned reads may exceed the total a little.
        total_bytes: bytes that this run reads in all.
        num_blocks, num_written: blocks of the store, and the finished ones, including those of former runs.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.read_bytes: Callable[[], int] = int
        self.total_bytes = 0
        self.num_blocks = 0
        self.num_written = 0
        self.started_s = time.monotonic()

    def start(self, read_bytes: Callable[[], int], total_bytes: int) -> None:
        """Start the clock of the rate."""
        self.started_s = time.monotonic()
        self.read_bytes, self.total_bytes = read_bytes, total_bytes

    def share(self) -> float | None:
        return min(1.0, self.read_bytes() / self.total_bytes) if self.total_bytes else None

    def line(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        if not self.total_bytes:
            return f"zinfer: checking, {clock(elapsed_s)} elapsed"
        done = min(self.read_bytes(), self.total_bytes)
        eta = clock((self.total_bytes - done) * elapsed_s / done) if done else "unknown"
        return (
            f"zinfer: {self.num_written}/{self.num_blocks} blocks, "
            f"{human_bytes(done)} of {human_bytes(self.total_bytes)} read, "
            f"{human_bytes(round(done / max(elapsed_s, 1e-3)))}/s, {clock(elapsed_s)} elapsed, ETA {eta}"
        )


@dataclass(frozen=True)
class StoreSummary:
    """A finished store.

    Attributes:
        output: its folder.
        num_blocks: blocks in it, of which ``num_skipped`` existed before this run.
        source_bytes: size of the source's weights.
        packed_bytes: size of the store's weights.
        read_bytes: read from the disk by this run.
        wall_s: seconds of this run, from the first read to the last file.
    """

    output: Path
    num_blocks: int
    num_skipped: int
    source_bytes: int
    packed_bytes: int
    read_bytes: int = 0
    wall_s: float = 0.0


def summary_table(summary: StoreSummary) -> Table:
    """Return the final table of `zinfer quantize`."""
    table = Table(title="zinfer quantize", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    former = f", {summary.num_skipped:,} of them before this run" if summary.num_skipped else ""
    rate = summary.read_bytes / summary.wall_s if summary.wall_s else 0.0
    table.add_row("blocks", f"{summary.num_blocks:,}{former}")
    table.add_row("source", f"{summary.source_bytes:,} bytes ({human_bytes(summary.source_bytes)})")
    table.add_row("packed", f"{summary.packed_bytes:,} bytes ({human_bytes(summary.packed_bytes)})")
    table.add_row("ratio", f"{summary.source_bytes / summary.packed_bytes:.2f} x smaller")
    table.add_row("wall", duration(summary.wall_s))
    table.add_row("read", f"{human_bytes(summary.read_bytes)}, {rate / 1e9:,.2f} GB/s")
    return table


_NUM_SLABS: Final = 2
# As in plans: 256 MiB bridge any hiccup of a disk of 4 GB/s.
_NUM_STAGING: Final = 16
_STAGING_BYTES: Final = 16 << 20

Keep: TypeAlias = Callable[[Block, memoryview], None]
"""Writes a block, from its slab's bytes. Called in a thread of its own, one block at a time."""


@dataclass
class _Slab:
    """Host memory for a slab; ``reusable_after`` is done, or failed, with the write of its former contents."""

    memory: HostBuffer
    reusable_after: "Future[None]"


def check_device(blocks: Sequence[Block], device: torch.device, what: str, instead: str = "") -> None:
    """Raise PlanError if a GPU has too little memory for converting the blocks' weights."""
    if device.type != "cuda":
        return
    needed, (free, _) = conversion_bytes(list(blocks), to_host=True), torch.cuda.mem_get_info(device)
    if free < needed:
        raise PlanError(
            f"{what} takes {needed:,} bytes ({human_bytes(needed)}) of device memory, {free:,} are free; end what else "
            f"uses the device{instead}"
        )


class Pipeline:
    """Threads and buffers that read and convert a checkpoint's blocks and pass their slabs to ``keep``.

    Args:
        device: converts the weights.
        files: identities of the checkpoint's files when it was opened.
        keep: writes a slab.
        observer: looks at what is read.
    """

    def __init__(
        self,
        device: torch.device,
        files: Mapping[Path, FileIdentity],
        keep: Keep,
        observer: ReadObserver | None = None,
    ) -> None:
        self._keep = keep
        self._stream = open_stream(device)
        with ExitStack() as owned:
            self._reader = owned.enter_context(closing(Reader(expected=files, observer=observer)))
            staging = owned.enter_context(closing(StagingRing()))
            for _ in range(_NUM_STAGING):
                staging.add(HostBuffer(_STAGING_BYTES, pin=self._stream.needs_pinned))
            self._slabs: deque[_Slab] = deque()
            owned.callback(self._free_slabs)
            # The lane is closed first, so that the writer's thread does not wait for it forever.
            self._writer = owned.enter_context(closing(Pool(1, "zinfer-write")))
            owned.callback(drain, self._stream)  # before the memory of copies under way is freed
            self._lane = owned.enter_context(closing(TransferLane("disk", self._stream, staging)))
            self._owned = owned.pop_all()

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk so far."""
        return self._reader.bytes_read

    def run(self, blocks: Sequence[Block]) -> None:
        """Process all blocks; returns when the last one is written.

        Raises:
            OSError: a read or ``keep`` failed.
            CheckpointError: a weight cannot be converted.
        """
        plain = [block for block in blocks if block.conversion is None]
        converted = [block for block in blocks if block.conversion is not None]
        for part, carry in ((plain, self._place), (converted, self._convert)):
            if part:
                self._allocate_slabs(max(block.nbytes for block in part))
                carry(part)
                for slab in self._slabs:
                    slab.reusable_after.result()

    def close(self) -> None:
        """Drop blocks not begun, end the threads and free the memory."""
        self._owned.close()

    def _allocate_slabs(self, nbytes: int) -> None:
        """Replace the slabs, which must be unused, by new ones of this size."""
        self._free_slabs()
        for _ in range(_NUM_SLABS):
            reusable_after: Future[None] = Future()
            reusable_after.set_result(None)
            self._slabs.append(_Slab(HostBuffer(nbytes, pin=self._stream.needs_pinned), reusable_after))

    def _free_slabs(self) -> None:
        while self._slabs:
            self._slabs.pop().memory.close()

    def _take_slab(self) -> tuple[HostBuffer, "Future[None]", "Future[None]"]:
        """Return the next slab, the future after which it is free, and the future to complete when it is free again."""
        slab = self._slabs[0]
        self._slabs.rotate(-1)
        reusable_after, slab.reusable_after = slab.reusable_after, Future()
        return slab.memory, reusable_after, slab.reusable_after

    def _place(self, blocks: Sequence[Block]) -> None:
        """Read blocks that need no conversion into their slabs."""
        for block in blocks:
            memory, reusable_after, written = self._take_slab()
            reusable_after.result()
            source = DiskSource(block, self._reader, self._lane.slot_bytes)
            transfer = Transfer(block.name, source, Target(memory.tensor, HostStream()))
            self._lane.submit(transfer)
            self._hand_over(block, memory, written, transfer.raise_failure)

    def _convert(self, blocks: Sequence[Block]) -> None:
        places: dict[int, tuple[HostBuffer, Future[None]]] = {}

        def hand_over(block: Block) -> None:
            self._hand_over(block, *places.pop(block.index), self._stream.mark_compute().synchronize)

        conversions = Conversions(blocks, self._lane, self._reader, done=hand_over)
        for block in blocks:
            memory, reusable_after, written = self._take_slab()
            places[block.index] = memory, written
            conversions.begin(block, memory.tensor[: block.nbytes], reusable_after)
        conversions.finish()

    def _hand_over(
        self, block: Block, memory: HostBuffer, written: "Future[None]", wait_filled: Callable[[], None]
    ) -> None:
        def write() -> None:
            try:
                wait_filled()
                self._keep(block, memory.memory[: block.nbytes])
            except BaseException as failure:  # raised again by the next user of the slab
                written.set_exception(failure)
            else:
                written.set_result(None)

        self._writer.submit(write)
