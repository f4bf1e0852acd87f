"""Parts of ranks that divide layers, kept for later starts: a store each, and the list that names them.

`save_mp_checkpoint_path` names the folder. The list has DeepSpeed's name and form, and the parts are stores, as under
`nvme_path`: checked by checksums, and read in place, also from the disk.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import xxhash
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.config.listing import CheckpointListing, checkpoint_path
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.grain import Grain
from zinfer.nvme.whole_file import replace_file
from zinfer.store.files import Caller
from zinfer.store.writing import write_store
from zinfer.weights import Checkpoint
from zinfer.weights.folder import PARTS_NAME, absolute
from zinfer.weights.header import parse_file
from zinfer.weights.native import Manifest
from zinfer.weights.quantized import Units

KEY: Final = "save_mp_checkpoint_path"
_GRAIN_NAME: Final = "zinfer_division.json"
_SAVER: Final = Caller(f"{KEY}:", KEY, 'convert with zinfer.device "cpu"', waits=True)
_NOTHING: Final = Quantization(rules=())


@dataclass(frozen=True)
class SavedPart:
    """What an earlier start has kept for this rank.

    Attributes:
        checkpoint: of the rank's part of each layer.
        grain: what stayed together when layers were divided.
    """

    checkpoint: Checkpoint
    grain: Grain


def save_part(checkpoint: Checkpoint, settings: Settings, dtype: torch.dtype, shard: Shard, grain: Grain) -> None:
    """Write this rank's part of each layer, quantized as the settings ask; does nothing if it is there.

    Args:
        checkpoint: the user's model.
        dtype: that products are computed in.
        grain: what stays together as the layers are divided.

    Raises:
        ConfigError: the folder holds something else, or there is no checkpoint's folder to read again.
        CheckpointError, PlanError, OSError: as `write_store`.
    """
    assert settings.save_parts is not None
    if checkpoint.is_listed:
        raise ConfigError(f"{KEY}: parts are made of a model's folder, not of a list of files; give the folder")
    folder = settings.save_parts.absolute() / _name(shard, shard.rank)
    wanted = replace(settings, quantization=settings.quantization or _NOTHING, dtype=dtype)
    write_store(checkpoint.folder, folder, wanted, caller=_SAVER, shard=shard)
    _place_json(folder / _GRAIN_NAME, asdict(replace(grain, units=dict(grain.units))))


@contextmanager
def written_module(module: PreTrainedModel, folder: Path) -> Iterator[Path]:
    """Write a module with its weights in memory to a temporary folder in ``folder``, and yield its path.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = TemporaryDirectory(dir=folder, prefix=".whole-")
    except OSError as error:
        raise ConfigError(f"{KEY}: nothing can be written to {folder} ({error.strerror}); name another") from error
    with made as name:
        module.save_pretrained(name)
        for file in Path(name).glob("*.safetensors"):
            # The parts of the same weights are found again by the times of their files; here a checksum stands for it.
            with file.open("rb") as opened:
                seconds = int(file_digest(opened, xxhash.xxh32).hexdigest(), 16)
            os.utime(file, (seconds, seconds))
        yield Path(name)


def list_parts(folder: Path, shard: Shard) -> None:
    """Write the list of all ranks' parts, once they are there; ``shard`` is any of them."""
    parts = [_name(shard, rank) for rank in range(shard.size)]
    found = {"non_tp": list[str](), "tp": parts}
    members = {"type": "ds_model", "version": 1.0, "parallelization": "tp", "tp_size": shard.size, "checkpoints": found}
    _place_json(folder / PARTS_NAME, members)


def find_part(model: object, settings: Settings, shard: Shard | None) -> SavedPart | None:
    """Open the part of this rank, if the model, or its checkpoint, is a list of parts; None if it is whole.

    Raises:
        ConfigError: the parts are of another number of ranks.
        CheckpointError: they are damaged, or not written by zinfer.
    """
    listing = _listing(model, settings)
    if listing is None:
        return None
    size = 1 if shard is None else shard.size
    if shard is None or size != listing.num_parts:
        raise ConfigError(
            f"{listing.label}: holds the parts of {listing.num_parts} ranks, and tensor_parallel.tp_size = {size}: "
            f"start {listing.num_parts} ranks that divide layers, or give the whole model"
        )
    folder = listing.paths[shard.rank]
    if not (folder / _GRAIN_NAME).is_file():
        raise CheckpointError(
            f"{listing.label}: {folder} is no part that {KEY} wrote here (parts of DeepSpeed's are pickled); give the "
            f"whole model, with {KEY} to write them again"
        )
    members = parse_file(folder / _GRAIN_NAME, (folder / _GRAIN_NAME).read_bytes(), "write the parts again")
    return SavedPart(Checkpoint.open(folder), _grain(members, folder))


def open_for_rank(model: str | os.PathLike[str], rank: int) -> tuple[Checkpoint, str]:
    """Open a model, or its part for a rank of a job, and return it with the fingerprint that all ranks have.

    Raises:
        ConfigError, CheckpointError: the list of parts, or a checkpoint, is damaged.
    """
    listing = _listing_in(model)
    if listing is None:
        checkpoint = Checkpoint.open(model)
        return checkpoint, checkpoint.fingerprint
    checkpoint = Checkpoint.open(listing.paths[rank % listing.num_parts])  # ranks that divide layers are neighbours
    return checkpoint, Manifest.read(checkpoint.folder).identity.source["fingerprint"]


def _listing(model: object, settings: Settings) -> CheckpointListing | None:
    if isinstance(model, str | os.PathLike):
        return _listing_in(model)
    listed = settings.checkpoint if not isinstance(model, Checkpoint) else None
    return listed if isinstance(listed, CheckpointListing) and listed.num_parts > 1 else None


def _listing_in(folder: str | os.PathLike[str]) -> CheckpointListing | None:
    """Return the list of parts in a folder that zinfer wrote; None if it has none."""
    path = absolute(folder) / PARTS_NAME
    listed = checkpoint_path(path) if path.is_file() and any(path.parent.glob(f"*/{_GRAIN_NAME}")) else None
    return listed if isinstance(listed, CheckpointListing) and listed.num_parts > 1 else None


def _grain(members: Mapping[str, Any], folder: Path) -> Grain:
    try:
        return Grain(int(members["preferred"]), {name: Units(**each) for name, each in members["units"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / _GRAIN_NAME}: damaged ({error!r}); write the parts again") from error


def _place_json(path: Path, members: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(members, indent=1) + "\n")  # perhaps by several ranks at once


def _name(shard: Shard, rank: int) -> str:
    kind = "tp" if shard.experts == 1 else "ep" if shard.within.size == 1 else f"ep{shard.experts}"
    return f"{kind}-{rank}-of-{shard.size}"
