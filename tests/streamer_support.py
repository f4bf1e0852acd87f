"""Shared by tests of `Streamer`: blocks over a file that differ in every byte, and a streamer on any device."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, Extent, Home, SlabLayout, Tier
from zinfer.offload.homes import Homes
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.slots import DeviceSlots, Slot
from zinfer.offload.staging import StagingRing
from zinfer.offload.stream import CopyStream
from zinfer.offload.streamer import Streamer
from zinfer.offload.transfer_lane import TransferLane

SHAPES = (("weight", (370, 11)), ("bias", (5,)), ("norm", (64,)))
HOMES = ("disk", "host", "pinned")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes that differ everywhere, starting at an odd offset for good measure."""
    path = tmp_path_factory.mktemp("blocks") / "blocks.bin"
    values = torch.arange(400_000, dtype=torch.int32)
    path.write_bytes(b"\x07" * 11 + values.numpy().tobytes())
    return path


def home(kind: str, stream: CopyStream) -> Home:
    """Pinned memory exists beside a CUDA device only."""
    return Home(Tier.DISK) if kind == "disk" else Home(Tier.HOST, pinned=kind == "pinned" and stream.needs_pinned)


def make_blocks(file: Path, count: int) -> list[Block]:
    """Blocks of int32 tensors, each over the next bytes of the file; the tensors of a block lie apart."""
    blocks, offset = [], 11
    for index in range(count):
        layout = SlabLayout.pack((name, torch.int32, shape) for name, shape in SHAPES)
        extents = []
        for tensor in layout.tensors:
            extents.append(Extent(file, offset, tensor.nbytes, torch.int32, tensor.offset, torch.int32))
            offset += tensor.nbytes + 4 * (index % 3)
        blocks.append(Block(index, f"block {index}", layout, tuple(extents)))
    return blocks


def expected(block: Block, data: bytes) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.frombuffer(
            bytearray(data[extent.offset : extent.offset + extent.nbytes]), dtype=torch.int32
        ).view(tensor.shape)
        for tensor, extent in zip(block.layout.tensors, block.extents, strict=True)
    }


@contextmanager
def streaming(
    blocks: Sequence[Block],
    homes: Sequence[str],
    num_slots: int,
    open_stream: Callable[[], CopyStream],
    *,
    synchronous: bool = False,
    chunk_bytes: int = 8192,
    num_staging: int = 3,
) -> Iterator[Streamer]:
    stream = open_stream()
    reader = Reader(num_threads=3, block_bytes=4096)
    staging = StagingRing()
    for _ in range(num_staging):
        staging.add(HostBuffer(chunk_bytes, pin=stream.device.type == "cuda"))
    lanes = {tier: TransferLane(tier.value, open_stream(), staging) for tier in (Tier.DISK, Tier.HOST)}
    filled = Homes(blocks, [home(kind, stream) for kind in homes], reader, lanes)
    size = max(block.nbytes for block in blocks)
    slots = DeviceSlots(Slot.allocate(size, stream) for _ in range(num_slots))
    streamer = Streamer(blocks, filled.sources, lanes, slots, synchronous=synchronous)
    try:
        yield streamer
    finally:
        streamer.close()
        filled.close()
        reader.close()
        staging.close()


def use(streamer: Streamer, block: Block, data: bytes, compute_s: float) -> None:
    """Wait, compute for a while, compare, release."""
    views = streamer.wait(block)
    time.sleep(compute_s)
    for name, want in expected(block, data).items():
        assert torch.equal(views[name].cpu(), want), f"{block.name}.{name} held other bytes"
    streamer.release(block)
