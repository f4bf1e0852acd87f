"""Chooses the safetensors files of a folder that has neither model.safetensors nor an index."""

import re
from pathlib import Path

from zinfer.checkpoint.faults import listed
from zinfer.errors import CheckpointError

NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<total>\d+)\.safetensors", re.ASCII)
MAX_TOTAL = 100_000


def loose_files(folder: Path) -> list[Path]:
    """Returns model*.safetensors if there are any, else every *.safetensors of one model, sorted by name.

    Raises:
        CheckpointError: only adapters, a gap in files numbered `-00001-of-00003`, or files of more than one model.
    """
    names = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    models = [name for name in names if not name.startswith("adapter_")]
    if not models:
        what = f"only an adapter, {listed(names)}" if names else "its *.safetensors are links to files that are gone"
        remedy = "merge it into its base model and pass that folder" if names else "download the model again"
        raise CheckpointError(f"{folder}: {what}: {remedy}")
    chosen = [name for name in models if name.startswith("model")] or models
    matches = {name: NUMBERED.fullmatch(name) for name in chosen}
    numbered_sets = {(match["stem"], int(match["total"])) for match in matches.values() if match}
    if numbered_sets and (len(numbered_sets) > 1 or not all(matches.values())):
        raise CheckpointError(
            f"{folder}: the files of several models, and no index to say which counts: {listed(chosen)}: "
            "keep those of one model"
        )
    for _, total in numbered_sets:
        _check_complete(folder, {int(match["part"]) for match in matches.values() if match}, total)
    return [folder / name for name in chosen]


def _check_complete(folder: Path, parts: set[int], total: int) -> None:
    # The number comes from a file's name: a huge one must not be counted up to.
    absent = [str(part) for part in range(1, min(total, MAX_TOTAL) + 1) if part not in parts]
    if absent:
        raise CheckpointError(f"{folder}: missing shard {listed(absent)} of {total}: download it")
