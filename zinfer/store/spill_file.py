"""Writes the weights of an in-memory module to an unnamed file under `nvme_path`, deleted with its engine.

Without a checkpoint to identify them, a later start could not reuse them.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Final

import torch

from zinfer.config import Settings
from zinfer.model.partition import ModelBlock
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.scratch import ScratchError, ScratchFile
from zinfer.offload.block import Extent
from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.limits import choose_device
from zinfer.store.files import stored_tensors
from zinfer.store.packed_cache import KEY, make_folder
from zinfer.store.pipeline import check_device
from zinfer.units import human_bytes

log = logging.getLogger(__name__)

_PLACE_BYTES: Final = 1 << 20  # each slab begins at a multiple of this in the file


@dataclass(frozen=True)
class ModuleFile:
    """A file with the slabs of a module's blocks, ready to stream.

    Attributes:
        scratch: the file.
        blocks: with extents in the file.
        identity: of the file after it was written.
    """

    scratch: ScratchFile
    blocks: tuple[ModelBlock, ...]
    identity: FileIdentity


def module_file(blocks: Sequence[ModelBlock], settings: Settings) -> ModuleFile | None:
    """Write the slabs of all blocks to a file, quantized if asked for. The module keeps its weights.

    Args:
        blocks: of the module, with weights in memory.
        settings: ask for a file if the offload device is the disk and `nvme_path` names a folder.

    Returns:
        the file; None if none is needed.

    Raises:
        ConfigError: the folder cannot be made.
        CheckpointError: a weight cannot be quantized.
        PlanError: the device has too little memory for quantizing.
        ScratchError: the disk is full or failed.
    """
    nvme_path = settings.offload.nvme_path
    if nvme_path is None or settings.offload.device != "nvme":
        return None
    device, folder = choose_device(settings), nvme_path.absolute()
    check_device([block.block for block in blocks], device, "quantizing the module's weights")
    counts = [-(-block.block.nbytes // _PLACE_BYTES) for block in blocks]
    log.warning(
        "%s: the module's weights, %s, are written to a file without a name in %s, and stream from there until the "
        "engine ends",
        *(KEY, human_bytes(sum(block.block.nbytes for block in blocks)), folder),
    )
    make_folder(folder)
    try:
        with ExitStack() as owned:  # a failure closes the file, although its traceback references it
            file = owned.enter_context(closing(ScratchFile(folder, _PLACE_BYTES)))
            places = iter(file.take(sum(counts)))
            for count, slab in zip(counts, _slabs(blocks, device, max(counts) * _PLACE_BYTES), strict=True):
                file.write(list(islice(places, count)), slab[: count * _PLACE_BYTES])
            owned.pop_all()
    except ScratchError as error:
        raise ScratchError(error.errno, f"{KEY}: {error.strerror}", error.filename) from error
    begins = accumulate(counts, initial=0)
    placed = tuple(
        _placed(block, file.path, begin * _PLACE_BYTES) for block, begin in zip(blocks, begins, strict=False)
    )
    return ModuleFile(file, placed, FileIdentity.of(file.path))


def _slabs(blocks: Sequence[ModelBlock], device: torch.device, num_bytes: int) -> Iterator[memoryview]:
    """Yield each slab in turn in the same buffer of ``num_bytes``; bytes after the slab are undefined."""
    slab = HostBuffer(num_bytes)
    for block in blocks:
        parameters = {binding.tensor: binding.module._parameters[binding.leaf] for binding in block.bindings}
        weights = {name: parameter.detach() for name, parameter in parameters.items() if parameter is not None}
        conversion, nbytes = block.block.conversion, block.block.nbytes
        if conversion is None:
            block.block.layout.fill(slab.tensor, weights)
        else:
            source = torch.empty(conversion.layout.nbytes, dtype=torch.uint8, device=device)
            conversion.layout.fill(source, weights)
            made = torch.empty(nbytes, dtype=torch.uint8, device=device)
            conversion.convert(source, made)
            slab.tensor[:nbytes].copy_(made)
        yield slab.memory


def _placed(block: ModelBlock, file: Path, begin: int) -> ModelBlock:
    """Return the block with extents in the file."""
    extents = tuple(
        Extent(file, begin + part.offset, part.nbytes, torch.uint8, part.offset, torch.uint8)
        for part in sorted(stored_tensors(block.block), key=lambda part: part.offset)
    )
    return replace(block, block=replace(block.block, conversion=None, extents=extents))
