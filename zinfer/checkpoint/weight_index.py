"""Reads the index of a sharded checkpoint, which names the file of each tensor; it opens no shard.

Strangers wrote the names: one that leads out of the checkpoint's folder is refused.
"""

from pathlib import Path, PurePosixPath, PureWindowsPath

from zinfer.checkpoint.faults import shorten
from zinfer.checkpoint.json_text import parse_file
from zinfer.errors import CheckpointError


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns tensor name -> file name, relative to the checkpoint's folder and inside it.

    Raises:
        CheckpointError: the index is not JSON, has no usable `weight_map`, or names a file outside.
        OSError: the index cannot be read.
    """
    members = parse_file(index, index.read_bytes(), "the index is corrupted, download it again")
    weight_map = members.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map of tensor names to file names: download the index again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(f"{index}: weight_map[{shorten(name)}] is not a file name: download the index again")
        check_file_name(file_name, f"{index}: weight_map[{shorten(name)}]")
    return weight_map


def check_file_name(file_name: str, owner: str) -> None:
    """Refuses a name that is empty, absolute or climbs out of its folder; `owner` says in the message who named it.

    Links inside the folder are followed: the Hugging Face cache is made of them.
    """
    parts = PurePosixPath(file_name).parts
    outside = PurePosixPath(file_name).is_absolute() or PureWindowsPath(file_name).anchor or ".." in parts
    if not parts or outside or "\\" in file_name or "\0" in file_name:
        raise CheckpointError(
            f"{owner} names {shorten(file_name)}, not a file inside the checkpoint's folder: "
            "do not trust this copy, download the checkpoint again from its authors"
        )
