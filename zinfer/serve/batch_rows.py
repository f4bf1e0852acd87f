"""The rows of a batch that are on the disk: counted, and parted into the files that clients get."""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from zinfer.jobs.index import scan_input
from zinfer.jobs.openai_response import expired_row
from zinfer.jobs.output import OutputFile
from zinfer.jobs.records import encode_row
from zinfer.jobs.rows import RowId, parse_line

_DONE: Final = b'"response":{"status_code":200,'


def count_rows(rows: Path) -> dict[str, int]:
    """Return the numbers of completed and failed rows; a torn last line is none."""
    counts = {"completed": 0, "failed": 0}
    with rows.open("rb") as source:
        for line in source:
            if line.endswith(b"\n"):
                counts["completed" if _DONE in line else "failed"] += 1
    return counts


def missing_rows(input: Path, rows: Path) -> list[RowId]:
    """Return the ids of the rows of a batch's input that have no row of output.

    Raises:
        JobError: one of the files cannot be used.
        OSError: the input cannot be read.
    """
    index = scan_input(input)
    with closing(OutputFile(rows)) as out:
        states, _ = out.resume(index)
    missing = (parse_line(line) for line, state in zip(index.lines(), states, strict=True) if not state)
    return [each.id for each in missing if each.is_openai]


def divide(rows: Path, expired: Sequence[RowId]) -> tuple[dict[str, Path], dict[str, int]]:
    """Part the rows that have answers from those that have errors, and leave the file as it is.

    If all of them are of one kind there is no copy, which a full disk has no room for, but a hard link.

    Args:
        expired: ids of rows that have not been computed in time, which is their error.

    Returns:
        the files, "output" and "error", without empty ones; and the numbers of rows as `count_rows`.
    """
    rows.touch()
    _drop_torn_line(rows)
    counts = count_rows(rows)
    has = {"output": counts["completed"] > 0, "error": counts["failed"] > 0 or bool(expired)}
    kinds = [kind for kind, is_there in has.items() if is_there]
    parts = {kind: rows.with_suffix(f".{kind}") for kind in kinds}
    for part in parts.values():
        part.unlink(missing_ok=True)
    if len(parts) == 1 and not expired:
        _link(rows, *parts.values())
        return parts, counts
    with rows.open("rb") as source, ExitStack() as stack:
        files = {kind: stack.enter_context(part.open("wb")) for kind, part in parts.items()}
        for line in source:
            files["output" if _DONE in line else "error"].write(line)
        for row_id in expired:
            files["error"].write(encode_row(expired_row(row_id)))
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
