"""What an engine writes under `nvme_path`: a store of weights that need conversion, and a file of a module's weights.

The first start writes the store and later starts reuse it; nothing deletes it. The file of a module in memory is
unnamed and deleted with its engine: without a checkpoint to identify them, a later start could not reuse its weights.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Final

import torch

from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.partition import ModelBlock
from zinfer.model.sharding.cut import Shard
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.reader import ReadObserver
from zinfer.nvme.scratch import ScratchError, ScratchFile
from zinfer.offload.block import Extent
from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.limits import choose_device
from zinfer.store.files import Caller, find_manifest, stored_tensors
from zinfer.store.pipeline import check_device
from zinfer.store.source import part_of, side_of
from zinfer.store.writing import write_store
from zinfer.units import human_bytes
from zinfer.weights import Checkpoint
from zinfer.weights.folder import CACHED_REPO_PREFIX
from zinfer.weights.native import Identity

log = logging.getLogger(__name__)

KEY: Final = "zero_optimization.offload_param.nvme_path"
ENGINE: Final = Caller(
    f"{KEY}:", KEY, "write a store with `zinfer quantize --device cpu` and give that as the model", waits=True
)
"""An engine that writes its own store."""
_NAME_CHARS: Final = 55  # of up to 4 bytes: with the digits and the rank within the 255 bytes of a file name
_NUM_DIGITS: Final = 12
_NOTHING: Final = Quantization(rules=())
"""For quantized checkpoints: quantized matrices are copied, full-precision weights stay in full precision."""


def stored_copy(
    checkpoint: Checkpoint,
    blocks: Sequence[ModelBlock],
    dtype: torch.dtype,
    settings: Settings,
    shard: Shard | None = None,
    observer: ReadObserver | None = None,
) -> Checkpoint | None:
    """Open the store of a checkpoint under `nvme_path`, writing it if it does not exist; None if none is needed.

    Logs the start and end of writing. Waits for another process that writes the same store.

    Args:
        checkpoint: the user's model.
        blocks: of the partitioned model; a store is needed if one of them must be converted, or holds columns of a
            matrix, whose rows would be read whole in every pass.
        dtype: that products are computed in.
        settings: the engine's.
        shard: the rank whose part of each layer the blocks hold; it has a store of its own.
        observer: looks at what is read of the checkpoint, if a store is written.

    Raises:
        ConfigError: the folder cannot be used, or a store cannot have these settings.
        CheckpointError: a weight cannot be quantized, or the existing store is damaged.
        PlanError: the device has too little memory for converting.
        OSError: the disk is full or failed. Finished blocks are kept.
    """
    nvme_path, rules = settings.offload.nvme_path, settings.quantization or _NOTHING
    is_convertible = any(block.block.conversion for block in blocks)
    reads_gaps = any(extent.rows > 1 for block in blocks for extent in block.block.extents)
    reads_gaps &= not checkpoint.is_listed
    if nvme_path is None or settings.offload.device != "nvme" or not (is_convertible or reads_gaps):
        return None
    if checkpoint.is_listed:
        raise ConfigError(
            f"{KEY}: weights are converted for the disk out of a model's folder, not out of a list of files; give the "
            "folder with config.json as the checkpoint"
        )
    identity = Identity.of(checkpoint, rules, dtype, shard=part_of(shard, settings), side=side_of(checkpoint, settings))
    name = f"{_model_name(checkpoint.folder)}-{identity.digest()[:_NUM_DIGITS]}"
    if shard is not None:
        name += shard.ending
    folder = nvme_path.absolute() / name
    with _damage_explained(folder):
        manifest = find_manifest(folder, identity, ENGINE)
    if manifest is None or not manifest.finished:
        make_folder(folder.parent)
        wanted = replace(settings, quantization=rules, dtype=dtype)
        _write(checkpoint, folder, wanted, sum(block.block.nbytes for block in blocks), shard, observer)
    with _damage_explained(folder):
        return Checkpoint.open(folder)


def _model_name(folder: Path) -> str:
    """Return the name of the model in a folder; in a Hugging Face cache that is the repository's name."""
    folder = folder.resolve()
    repo = folder.parent.parent
    is_cached = folder.parent.name == "snapshots" and repo.name.startswith(CACHED_REPO_PREFIX)
    return (repo.name.removeprefix(CACHED_REPO_PREFIX) if is_cached else folder.name)[:_NAME_CHARS]


def make_folder(nvme_path: Path) -> None:
    try:
        nvme_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{KEY}: {nvme_path} cannot be made a folder ({error.strerror}); name one that can be written to"
        ) from error


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    settings: Settings,
    num_bytes: int,
    shard: Shard | None,
    observer: ReadObserver | None,
) -> None:
    log.warning(
        "%s: %s is written once, %s made of %s; later starts stream from there",
        *(KEY, folder, human_bytes(num_bytes), checkpoint.folder),
    )
    begin_s = time.perf_counter()
    try:
        summary = write_store(checkpoint.folder, folder, settings, caller=ENGINE, shard=shard, observer=observer)
    except OSError as error:
        if isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
            remedy = f"what is finished in {folder} is kept: make room there, or give another {KEY}"
            raise OSError(error.errno, f"{error.strerror}; {remedy}", error.filename) from error
        raise
    log.warning(
        "%s is finished after %.1f s: %s (%s bytes) in %s blocks, %s of which were there already",
        folder,
        time.perf_counter() - begin_s,
        human_bytes(summary.packed_bytes),
        f"{summary.packed_bytes:,}",
        summary.num_blocks,
        summary.num_skipped,
    )


@contextmanager
def _damage_explained(folder: Path) -> Iterator[None]:
    """Explain that a damaged cached store can be deleted, and is then written again."""
    try:
        yield
    except CheckpointError as error:
        remedy = f"It was written under {KEY}: remove {folder}, and the next start writes it again"
        raise CheckpointError(f"{error}. {remedy}") from error


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
