"""Parses the JSON that comes with a checkpoint: headers, indexes and configs."""

import json
from pathlib import Path
from typing import Any

from zinfer.errors import CheckpointError


class JsonFault(ValueError):
    """What is wrong with a JSON text; `position` is the byte in it, where the parser knows."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason)
        self.position = position


def parse_object(data: bytes) -> dict[str, Any]:
    """Returns the JSON object in `data`, UTF-8 text.

    Raises:
        JsonFault: not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise JsonFault("not valid UTF-8", error.start) from error
    except json.JSONDecodeError as error:
        raise JsonFault(f"not valid JSON: {error.msg}", len(text[: error.pos].encode("utf-8"))) from error
    except RecursionError as error:
        raise JsonFault("nested too deeply") from error
    except ValueError as error:  # an integer longer than Python's limit on digits
        raise JsonFault(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise JsonFault("not a JSON object", 0)
    return value


def parse_file(path: Path, data: bytes, remedy: str) -> dict[str, Any]:
    """As `parse_object`, of a file's bytes. Raises CheckpointError: names the file, the byte and the remedy."""
    try:
        return parse_object(data)
    except JsonFault as fault:
        where = "" if fault.position is None else f" at byte {fault.position}"
        raise CheckpointError(f"{path}:{where} {fault}: {remedy}") from fault
