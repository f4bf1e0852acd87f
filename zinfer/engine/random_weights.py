"""Random weights for a model of which only config.json exists, to measure how fast it would run.

All blocks are read from one file of random numbers, one after the other and from its beginning again, so that homes
of a terabyte are filled and streamed through the real pipeline with little disk. Homes are filled from the page cache;
after `RandomWeights.leave_cache` the file is read with direct I/O like any checkpoint, at full traffic.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from zinfer.checkpoint import Checkpoint
from zinfer.config import Settings
from zinfer.engine.prepare import PreparedModel
from zinfer.engine.routing import skew_routers
from zinfer.model.build import find_dtype, report_device
from zinfer.model.dtype import warn_of_overflow
from zinfer.model.partition import ModelBlock
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.shorter_model import ShorterModel
from zinfer.model.weight_matching import load_buffers
from zinfer.nvme.aligned import align_up
from zinfer.nvme.file_identity import FileIdentity
from zinfer.offload.block import Extent
from zinfer.offload.partition import WHOLE, Partition
from zinfer.units import human_bytes

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
        experts: how often a mixture's experts are chosen: "uniform", as random routers nearly do, or "zipf"
            (`zinfer.engine.routing`).
        partition: of the slabs among ranks. Each writes a file of its own, of the same numbers.
        blocks: the blocks of the prepared model, in the model's order.
        file_bytes: bytes written.
    """

    folder: Path
    experts: str = "uniform"
    partition: Partition = WHOLE
    blocks: tuple[ModelBlock, ...] = field(default=(), init=False)
    file_bytes: int = field(default=0, init=False)

    @property
    def file(self) -> Path:
        return self.folder / FILE_NAME

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
        """
        assert checkpoint is not None, "random weights need the outline of a checkpoint"
        if self.experts == "zipf":
            skew_routers(module)
        prepared = RandomModel.of(module, checkpoint, settings, sharding, part)
        if is_first := not self.blocks:
            slab_sizes = [align_up(block.block.layout.nbytes, _ALIGNMENT_BYTES) for block in prepared.blocks]
            num_bytes = max(max(slab_sizes), min(sum(slab_sizes), _USUAL_BYTES))
        else:
            num_bytes = self.file.stat().st_size
        blocks = _aliased(prepared.blocks, self.file, num_bytes)
        if is_first:
            self.blocks = blocks
            self.file_bytes = write_random(self.file, num_bytes, find_dtype(module), cached=True)
        files = {self.file: FileIdentity.of(self.file)}
        return replace(prepared, checkpoint=replace(checkpoint, files=files), blocks=blocks)

    def leave_cache(self) -> None:
        """Let the system forget the file's pages, so that passes read them from the disk."""
        _forget_pages(self.file)


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


def write_random(file: Path, num_bytes: int, dtype: torch.dtype, *, cached: bool = False) -> int:
    """Write bytes that are finite numbers however a slab reads them, and flush them to the disk.

    They are normal numbers of standard deviation 0.02 in ``dtype`` whose lower bytes are masked: read as INT8 or INT4
    codes, as FP8, or as scales in 16 or 32 bits they are neither infinite nor NaN. A byte depends on its place alone.

    Args:
        file: the new file, whose folder exists.
        num_bytes: its size, rounded up to 4,096.
        dtype: float32, float16 or bfloat16.
        cached: whether its pages stay in the system's page cache.

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
    with file.open("wb") as out:
        for number in range(-(-total // len(piece))):
            # Turned by whole words, so that no two pages of the file are equal and no drive stores them once.
            out.write(piece.roll(number * 8 * 1021)[: total - number * len(piece)].numpy().data)
        out.flush()
        os.fsync(out.fileno())
    if not cached:
        _forget_pages(file)
    return total


def _forget_pages(file: Path) -> None:
    with file.open("rb") as opened:
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
