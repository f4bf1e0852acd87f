"""Random weights for a model of which only config.json exists, to measure how fast it would run.

All blocks are read from one file of random numbers, one after the other and from its beginning again, so that homes
of a terabyte are filled and streamed through the real pipeline with little disk. Ranks of a host share the file, as
they share a checkpoint. Homes are filled from the page cache while the file goes to the disk; after
`RandomWeights.leave_cache` it is read with direct I/O like any checkpoint, at full traffic.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.engine.prepare import PreparedModel
from zinfer.engine.routing import skew_routers
from zinfer.model.build import find_dtype, report_device, warn_of_overflow
from zinfer.model.matching import load_buffers
from zinfer.model.partition import ModelBlock
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.stage import ShorterModel
from zinfer.nvme.aligned import align_up
from zinfer.nvme.file_identity import FileIdentity
from zinfer.offload.block import Extent
from zinfer.offload.partition import WHOLE, Partition
from zinfer.ranks.group import RankGroup, all_values
from zinfer.units import human_bytes
from zinfer.weights import Checkpoint
from zinfer.weights.quantized import find_stored_scheme

FILE_NAME: Final = "random.bin"
_ALIGNMENT_BYTES: Final = 4096  # of direct I/O
_PIECE_BYTES: Final = 16 << 20
_USUAL_BYTES: Final = 1 << 30  # of the file: more than a drive's own cache
_SPREAD: Final = 0.02  # standard deviation of the matrices of untrained models
_SEED: Final = 0


@dataclass(eq=False)
class RandomWeights:
    """Prepares one model over a file of random numbers; its `prepare` is for `LLM`.

    Attributes:
        folder: where the file is written, and left.
        file: the file that is read: the one in ``folder``, or that of another rank of this host.
        experts: how often a mixture's experts are chosen: "uniform", as random routers nearly do, or "zipf"
            (`zinfer.engine.routing`).
        partition: of the slabs among ranks.
        group: the ranks, all of which prepare a model; None: there are no others.
        blocks: the blocks of the prepared model, in the model's order.
        file_bytes: bytes written; 0 on a rank that reads the file of another.
    """

    folder: Path
    experts: str = "uniform"
    partition: Partition = WHOLE
    group: RankGroup | None = None
    file: Path = field(init=False)
    blocks: tuple[ModelBlock, ...] = field(default=(), init=False)
    file_bytes: int = field(default=0, init=False)
    _on_disk: "Future[None] | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.file = self.folder / FILE_NAME

    def prepare(
        self,
        module: PreTrainedModel,
        checkpoint: Checkpoint | None,
        settings: Settings,
        sharding: Sharding | None = None,
        part: ShorterModel | None = None,
    ) -> PreparedModel:
        """Partition the module into blocks that are read from the file.

        The first call, for the whole model, writes it; later ones are for some of the layers.

        Raises:
            CheckpointError, ConfigError: as `PreparedModel.of`.
            OSError: the file cannot be written; ENOSPC names the bytes that it needs.
            RankError: another rank has ended.
        """
        assert checkpoint is not None, "random weights need the outline of a checkpoint"
        if self.experts == "zipf":
            skew_routers(module)
        if settings.quantization is None and (scheme := find_stored_scheme(checkpoint)) is not None:
            settings = replace(settings, quantization=scheme.planned)
        prepared = RandomModel.of(module, checkpoint, settings, sharding, part)
        if not self.blocks:
            slab_sizes = [align_up(block.block.layout.nbytes, _ALIGNMENT_BYTES) for block in prepared.blocks]
            self._make_file(max(max(slab_sizes), min(sum(slab_sizes), _USUAL_BYTES)), find_dtype(module))
        blocks = _aliased(prepared.blocks, self.file, self.file.stat().st_size)
        self.blocks = self.blocks or blocks
        files = {self.file: FileIdentity.of(self.file)}
        return replace(prepared, checkpoint=replace(checkpoint, files=files), blocks=blocks)

    def _make_file(self, num_bytes: int, dtype: torch.dtype) -> None:
        """Write the file, or wait until the first rank of this host has: as large as any of them needs."""
        if self.group is None:
            self._write(num_bytes, dtype)
            return
        hosts, own = self.group.hosts, self.group.rank
        asked = all_values(self.group, (num_bytes, str(self.file)))
        here = [rank for rank, host in enumerate(hosts) if host == hosts[own]]
        self.file = Path(asked[here[0]][1])
        if own == here[0]:
            self._write(max(asked[rank][0] for rank in here), dtype)
        all_values(self.group, None)

    def _write(self, num_bytes: int, dtype: torch.dtype) -> None:
        """Write the file into the page cache, and begin to write it to the disk."""
        self.file_bytes = write_random(self.file, num_bytes, dtype)
        with ThreadPoolExecutor(1, "zinfer-random") as flushing:
            self._on_disk = flushing.submit(_flush, self.file)
            flushing.shutdown(wait=False)

    def wait_for_disk(self) -> None:
        """Wait until what this rank has written is on the disk. Raises OSError if the disk failed, or is full."""
        if self._on_disk is not None:
            self._on_disk.result()

    def leave_cache(self) -> None:
        """Let the system forget the file's pages, so that passes read them from the disk.

        Called once all ranks have filled their homes, and the file is on the disk.
        """
        forget_pages(self.file)


class RandomModel(PreparedModel):
    """A prepared model whose slabs hold random bytes; persistent buffers keep the values that the constructor set."""

    def with_packed_copy(self) -> PreparedModel:
        """Return itself: the slabs are in their final form already."""
        return self

    @property
    def loaded(self) -> None:
        """None: each rank has written all that it reads."""
        return None

    def take_to(self, device: torch.device) -> None:
        """Move the buffers to the device without reading any, and make the module report it as its device."""
        for buffer in self.module.buffers():
            if buffer.is_floating_point() and not bool(buffer.isfinite().all()):
                buffer.zero_()  # the constructor left it unset
        load_buffers(self.module, {}, device)
        report_device(self.module, device)
        warn_of_overflow(self.module, find_dtype(self.module))


def _aliased(blocks: Sequence[ModelBlock], file: Path, num_bytes: int) -> tuple[ModelBlock, ...]:
    """Return the blocks in their stored form, each read whole from a place in the file, one after the other."""
    found, at = [], 0
    for block in blocks:
        slab_bytes = block.block.layout.nbytes
        if at + slab_bytes > num_bytes:
            at = 0
        extent = Extent(file, at, slab_bytes, torch.uint8, 0, torch.uint8)
        found.append(replace(block, block=replace(block.block, extents=(extent,), conversion=None)))
        at = align_up(at + slab_bytes, _ALIGNMENT_BYTES)
    return tuple(found)


def write_random(file: Path, num_bytes: int, dtype: torch.dtype) -> int:
    """Write bytes that are finite numbers however a slab reads them, into the page cache.

    They are normal numbers of standard deviation 0.02 in ``dtype`` whose lower bytes are masked: read as INT8 or INT4
    codes, as FP8, or as scales in 16 or 32 bits they are neither infinite nor NaN. A byte depends on its place alone.

    Args:
        file: the new file, whose folder exists.
        num_bytes: its size, rounded up to 4,096.
        dtype: float32, float16 or bfloat16.

    Returns:
        The bytes written.

    Raises:
        OSError: the disk failed, or has too little room.
    """
    total, free = align_up(num_bytes, _ALIGNMENT_BYTES), shutil.disk_usage(file.parent).free
    if total > free:
        raise OSError(
            errno.ENOSPC,
            f"{human_bytes(total)} of random weights are needed, the size of the largest block at least, and "
            f"{human_bytes(free)} are free; state another folder as zero_optimization.offload_param.nvme_path",
            str(file),
        )
    piece = random_bytes(min(_PIECE_BYTES, total), dtype)
    twice = torch.cat([piece, piece]).numpy().data
    with file.open("wb", buffering=0) as out:
        for number in range(-(-total // len(piece))):
            # Turned by whole words, so that no two pages of the file are equal and no drive stores them once.
            begin = number * 8 * 1021 % len(piece)
            left = twice[begin : begin + min(len(piece), total - number * len(piece))]
            while left:
                left = left[out.write(left) :]
    return total


def _flush(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def forget_pages(file: Path) -> None:
    """Write a file to the disk, and let the system forget its pages."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def random_bytes(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return such numbers as uint8 [num_bytes]; see `write_random`."""
    generator = torch.Generator().manual_seed(_SEED)
    words = torch.empty(num_bytes // dtype.itemsize).normal_(0, _SPREAD, generator=generator).to(dtype)
    found = words.view(torch.uint8)
    found[0 :: dtype.itemsize] &= 0x77  # FP8's NaN is 0x7f
    if dtype is torch.float32:  # its lower half is small and finite as float16 too
        found[1::4] &= 0x33
        found[2::4] &= 0x77
    return found
