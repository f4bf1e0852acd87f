"""A checkpoint given as a list of its files, in DeepSpeed's form: {"type", "checkpoints", "version", "base_dir"}."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from zinfer.config.source import read_json
from zinfer.config.values import NoEffect, NotAvailable, Unusable, path, show
from zinfer.errors import ConfigError

_MEMBERS: Final = {"type", "checkpoints", "version", "base_dir", "parallelization", "mp_size", "tp_size", "dtype"}
_EXPECTED: Final = 'an object like {"type": "ds_model", "checkpoints": ["model.safetensors"], "version": 1.0}'
_TRAINING_MEMBERS: Final = {"tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"}
_FOLDER: Final = "the path of a folder with config.json and *.safetensors"


@dataclass(frozen=True)
class CheckpointListing:
    """A list of files with a model's weights.

    Attributes:
        label: name of the list in messages: its file, or the key.
        files: names as written, or a single folder instead.
        base_dir: folder of relative names; None: the current directory, as in DeepSpeed.
        num_parts: ranks whose parts of each layer are listed, a folder each; 1: whole layers.
    """

    label: str
    files: tuple[Path, ...]
    base_dir: Path | None = None
    num_parts: int = 1

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the files."""
        return tuple((self.base_dir or Path()) / file for file in self.files)

    @classmethod
    def of(cls, members: Mapping[str, object], label: str) -> CheckpointListing:
        """Read the object.

        Raises:
            Unusable: a member is missing, unknown or invalid.
            NotAvailable: the files hold parts of split layers.
        """
        for name in members:
            if name not in _MEMBERS:
                raise Unusable(f"{_EXPECTED}; the member {show(name)} is not known")
        kind, listed, base_dir = members.get("type"), members.get("checkpoints"), members.get("base_dir") or None
        if not isinstance(kind, str):
            raise Unusable(_EXPECTED, "type", kind)
        is_split, num_parts = any(members.get(name, 1) not in (0, 1) for name in ("mp_size", "tp_size")), 1
        if isinstance(listed, Mapping) and members.get("parallelization") == "tp" and not listed.get("non_tp"):
            listed, is_split = listed.get("tp"), False
            num_parts = len(listed) if isinstance(listed, list) else 0
            if not num_parts or num_parts != members.get("tp_size"):
                raise Unusable("as many parts as tp_size says", "checkpoints.tp", listed)
        if kind.lower() == "megatron" or isinstance(listed, Mapping) or is_split:
            raise NotAvailable("weights that training or another run has split over GPUs", _FOLDER)
        if base_dir is not None and not isinstance(base_dir, str | os.PathLike):
            raise Unusable("a path, as text", "base_dir", base_dir)
        names = [listed] if isinstance(listed, str | os.PathLike) else listed
        if not isinstance(names, list | tuple) or not names:
            raise Unusable("the names of files, one at least", "checkpoints", listed)
        if not all(isinstance(name, str | os.PathLike) and os.fspath(name) for name in names):
            raise Unusable("names of files", "checkpoints", listed)
        files = tuple(Path(name) for name in names)
        return cls(label, files, None if base_dir is None else Path(base_dir), num_parts)


def checkpoint(value: object) -> Path | CheckpointListing | NoEffect:
    """Parse `checkpoint`: a folder, a list of files as an object, or the path of a JSON file with such an object. Also
    accepts DeepSpeed's training section of the same name."""
    if isinstance(value, Mapping):
        if set(value) <= _TRAINING_MEMBERS:
            return NoEffect("says how training checkpoints are written and validated; none is written here")
        return CheckpointListing.of(value, "checkpoint")
    return checkpoint_path(value)


def checkpoint_path(value: object) -> Path | CheckpointListing:
    """Parse a `checkpoint` that is a path."""
    file = path(value)
    if file.suffix != ".json":
        return file
    try:
        listing = CheckpointListing.of(read_json(file, "checkpoint"), str(file))
        is_loose = listing.num_parts > 1 and listing.base_dir is None
        return replace(listing, base_dir=file.parent) if is_loose else listing  # parts lie beside their list
    except Unusable as fault:
        found = f"{fault.inside} = {show(fault.value)}" if fault.inside else "the list"
        raise ConfigError(f"{file}: {found}{fault}") from None
