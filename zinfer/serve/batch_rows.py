"""The rows of a batch that are on the disk: counted, and parted into the files that clients get."""

import os
import shutil
from pathlib import Path
from typing import Final

_DONE: Final = b'"response":{"status_code":200,'


def count_rows(rows: Path) -> dict[str, int]:
    """Return the numbers of completed and failed rows; a torn last line is none."""
    counts = {"completed": 0, "failed": 0}
    with rows.open("rb") as source:
        for line in source:
            if line.endswith(b"\n"):
                counts["completed" if _DONE in line else "failed"] += 1
    return counts


def divide(rows: Path) -> tuple[dict[str, Path], dict[str, int]]:
    """Part the rows that have answers from those that have errors, and leave the file as it is.

    If all of them are of one kind there is no copy, which a full disk has no room for, but a hard link.

    Returns:
        the files, "output" and "error", without empty ones; and the numbers of rows as `count_rows`.
    """
    _drop_torn_line(rows)
    counts = count_rows(rows)
    kinds = [kind for kind, name in (("output", "completed"), ("error", "failed")) if counts[name]]
    parts = {kind: rows.with_suffix(f".{kind}") for kind in kinds}
    for part in parts.values():
        part.unlink(missing_ok=True)
    if len(parts) == 1:
        _link(rows, *parts.values())
    elif parts:
        with rows.open("rb") as source, parts["output"].open("wb") as output, parts["error"].open("wb") as errors:
            for line in source:
                (output if _DONE in line else errors).write(line)
    return parts, counts


def _link(rows: Path, part: Path) -> None:
    try:
        part.hardlink_to(rows)
    except OSError:  # the file system has none
        shutil.copyfile(rows, part)


def _drop_torn_line(rows: Path) -> None:
    with rows.open("rb") as source:
        num_bytes = sum(len(line) for line in source if line.endswith(b"\n"))
    if num_bytes < rows.stat().st_size:
        os.truncate(rows, num_bytes)
