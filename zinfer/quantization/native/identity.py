"""Identifies the source of a store: the source's files and every setting that changes the store's bytes.

Source files are identified by samples and modification times, because looking up a store must not read a whole
checkpoint; the checkpoint's folder may move.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.fingerprint import weights_sample
from zinfer.config.quantization_rules import Quantization
from zinfer.nvme.file_identity import FileIdentity

_NAME = "name"


@dataclass(frozen=True)
class Identity:
    """The identity of a store's source; the folder's name in ``source`` is for messages and not compared."""

    source: Mapping[str, str]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        rules: Quantization,
        dtype: torch.dtype,
        calibration: str | None = None,
        shard: str | None = None,
    ) -> "Identity":
        """Make the identity of an opened source; reads samples of its weights, which distinguish fine-tunes of a model.

        Args:
            calibration: hash of the calibration's prompts.
            shard: the rank among how many whose part of each layer the store holds; None: whole layers.

        Raises:
            OSError: a file cannot be read.
        """
        source = {
            _NAME: checkpoint.folder.name,
            "fingerprint": checkpoint.fingerprint,
            "weights_sample": weights_sample(tuple(checkpoint.files)),
            "weights_written": _written(checkpoint.files),
        }
        settings = {"dtype": str(dtype).removeprefix("torch.")} | rules.as_document()
        del settings["activations"]  # changes no byte of a store
        settings |= {"calibration_sha256": calibration} if calibration else {}
        return cls(source, settings | ({"shard": shard} if shard else {}))

    def digest(self) -> str:
        """Return the SHA-256 of all compared values, in hexadecimal digits."""
        source = {name: value for name, value in self.source.items() if name != _NAME}
        members = {"source": source, "settings": dict(self.settings)}
        return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()

    def differences(self, now: "Identity") -> list[str]:
        """Return one line for each difference, worded for the user; empty for the same store."""
        former, new = dict(self.source), dict(now.source)
        if {**former, _NAME: ""} == {**new, _NAME: ""}:
            former = new
        old_values = dict(_leaves(former, "source")) | dict(_leaves(self.settings, "settings"))
        new_values = dict(_leaves(new, "source")) | dict(_leaves(now.settings, "settings"))
        return [
            f"{path}: {old_values.get(path, 'absent')} in the store, {new_values.get(path, 'absent')} now"
            for path in dict.fromkeys((*old_values, *new_values))
            if old_values.get(path) != new_values.get(path)
        ]


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the JSON text of every scalar in a JSON document."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}[{number}]")
    else:
        yield path, json.dumps(value)


def _written(files: Mapping[Path, FileIdentity]) -> str:
    """Return the latest modification time of the files, and a digest of their names, sizes and times."""
    known = sorted((file.name, identity.num_bytes, identity.mtime_ns) for file, identity in files.items())
    last = max(files.values(), key=lambda identity: identity.mtime_ns)
    return f"{last.written_at} ({hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]})"
