"""The store that an engine writes under `nvme_path` if weights stream from the disk but need conversion.

The first start writes it and later starts reuse it; nothing deletes it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.folder import CACHED_REPO_PREFIX
from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.partition import ModelBlock
from zinfer.model.sharding.cut import Shard
from zinfer.nvme.reader import ReadObserver
from zinfer.quantization.native.identity import Identity
from zinfer.store.folder import Caller, find_manifest
from zinfer.store.source import part_of
from zinfer.store.writing import write_store
from zinfer.units import human_bytes

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
    identity = Identity.of(checkpoint, rules, dtype, shard=part_of(shard, settings))
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
