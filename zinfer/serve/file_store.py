"""`FileStore`: files that clients have uploaded, and those that batches have written, each with what is said of it."""

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from zinfer.errors import ConfigError
from zinfer.nvme.whole_file import place_file, replace_file, sync_file
from zinfer.serve.caller import CALLER, may_see
from zinfer.serve.errors import ApiError

_CHUNK_BYTES: Final = 1 << 20
_Kept = TypeVar("_Kept", bound=BaseModel)
log = logging.getLogger("zinfer.serve")


class StoredFile(BaseModel):
    """A file as OpenAI's interface shows it; times are seconds since the epoch.

    owner: who has uploaded it, or begun the batch that has written it, as `CALLER`; kept, and not shown.
    """

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed", "error"] = "processed"
    owner: Annotated[str, Field(exclude=True)] = ""


def ordered_name() -> str:
    """Return a name that no one can guess; those made later sort after it."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def json_with_owner(kept: Any) -> str:
    """Return the JSON text of a model with the owner that its answers leave out."""
    return json.dumps({**kept.model_dump(mode="json"), "owner": kept.owner}, ensure_ascii=False)


def read_kept(path: Path, kind: type[_Kept]) -> _Kept:
    """Return what is said of a file or a batch. Raises ConfigError if it is damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        remedy = "move it out of the folder, or give another --files"
        raise ConfigError(f"{path} is damaged ({problem}); {remedy}") from None


class FileStore:
    """Files in a folder: ``ID`` holds the bytes, ``ID.json`` the `StoredFile`, which is written after them.

    Args:
        folder: made if it is missing.
        quota_bytes: of the files of one caller; those that batches write count, and are never refused.

    Attributes:
        folder: the same.

    Raises:
        ConfigError: what is said of a file is damaged.
    """

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self.folder, self._quota_bytes = folder, quota_bytes
        folder.mkdir(parents=True, exist_ok=True)
        found = [read_kept(path, StoredFile) for path in folder.glob("file-*.json")]
        self._files = {each.id: each for each in sorted(found, key=lambda each: (each.created_at, each.id))}
        self._coming: dict[str, StoredFile] = {}  # uploads that are written now
        for path in (*folder.glob("file-*"), *folder.glob(".file-*.tmp")):  # uploads that were cut short
            if path.suffix != ".json" and path.name not in self._files:
                path.unlink()
        for file in self._files.values():
            file.status = "error" if (problem := self._problem(file)) else "processed"
            if problem:
                log.warning("zinfer: --files: %s", problem)

    async def add(self, source: BinaryIO, filename: str, purpose: str) -> StoredFile:
        """Store a file, from where ``source`` is; it is on the disk then.

        Raises:
            ApiError: the caller's files are too many bytes.
            OSError: it cannot be written; nothing of it is left.
        """
        num_bytes = await asyncio.to_thread(_size, source)
        held = [*self._files.values(), *self._coming.values()]
        used_bytes = sum(each.bytes for each in held if each.owner == CALLER.get())
        if used_bytes + num_bytes > self._quota_bytes:
            raise ApiError(
                413,
                f"your files have {used_bytes:,} bytes, and {num_bytes:,} more are above the quota of "
                f"{self._quota_bytes:,} (--file-quota of the server); delete files that you need no longer",
                code="quota_exceeded",
            )
        stored = _described(f"file-{ordered_name()}", num_bytes, filename, purpose, CALLER.get())
        self._coming[stored.id] = stored
        try:
            await asyncio.to_thread(self._write, source, stored)
        finally:
            del self._coming[stored.id]
        self._files[stored.id] = stored
        return stored

    async def adopt(self, source: Path, name: str, filename: str, purpose: str, owner: str) -> StoredFile:
        """Take over a file of the same file system, which is moved here, in place of one of the same name.

        It is on the disk then. Raises OSError if it cannot be.
        """
        stored = _described(name, source.stat().st_size, filename, purpose, owner)
        await asyncio.to_thread(self._move, source, stored)
        self._files[name] = stored
        return stored

    def get(self, name: str) -> StoredFile:
        """Return what is said of a file. Raises ApiError if the caller has none of this name."""
        if name not in self._files or not may_see(self._files[name].owner):
            raise ApiError(404, f"there is no file {name!r:.100}", code="file_not_found")
        return self._files[name]

    def path(self, name: str) -> Path:
        """Return the path of a file's bytes. Raises as `get`, and if they are gone or damaged."""
        file = self.get(name)
        if problem := self._problem(file):
            raise ApiError(410, problem, code="file_damaged")
        return self.folder / file.id

    def list(self, keep: Callable[[StoredFile], bool] = lambda file: True) -> "list[StoredFile]":
        """Return the caller's files that ``keep`` chooses, the newest first."""
        return [each for each in reversed([*self._files.values()]) if may_see(each.owner) and keep(each)]

    def remove(self, name: str) -> None:
        """Remove a file. Raises as `get`."""
        path = self.folder / self.get(name).id
        for each in (path.with_name(f"{name}.json"), path):
            each.unlink(missing_ok=True)
        del self._files[name]

    def _problem(self, file: StoredFile) -> str:
        """Return what is wrong with a file's bytes; empty if nothing is."""
        remedy = "upload it again" if file.purpose == "batch" else "create its batch again"
        try:
            num_bytes = (self.folder / file.id).stat().st_size
        except FileNotFoundError:
            return f"the bytes of {file.id} ({file.filename}) are gone from the server's folder; {remedy}"
        if num_bytes == file.bytes:
            return ""
        return f"{file.id} ({file.filename}) is damaged: {num_bytes:,} of its {file.bytes:,} bytes are there; {remedy}"

    def _write(self, source: BinaryIO, stored: StoredFile) -> None:
        path = self.folder / stored.id
        place_file(path, iter(lambda: source.read(_CHUNK_BYTES), b""))
        try:
            self._describe(stored)
        except BaseException:
            path.unlink()
            raise

    def _move(self, source: Path, stored: StoredFile) -> None:
        sync_file(source)
        source.replace(self.folder / stored.id)
        self._describe(stored)

    def _describe(self, stored: StoredFile) -> None:
        """Write what is said of a file, and sync the folder after it, for the names of both."""
        replace_file(self.folder / f"{stored.id}.json", json_with_owner(stored))


def _described(name: str, num_bytes: int, filename: str, purpose: str, owner: str) -> StoredFile:
    now = int(time.time())
    return StoredFile(id=name, bytes=num_bytes, created_at=now, filename=filename, purpose=purpose, owner=owner)


def _size(source: BinaryIO) -> int:
    begin = source.tell()
    size = source.seek(0, os.SEEK_END) - begin
    source.seek(begin)
    return size
