"""`FileStore`: files that clients have uploaded, and those that batches have written, each with what is said of it."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import aiofiles
from pydantic import BaseModel, Field

from zinfer.nvme.whole_file import replace_file, sync_folder
from zinfer.serve.caller import CALLER, may_see
from zinfer.serve.errors import ApiError

_CHUNK_BYTES: Final = 1 << 20


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
    status: Literal["processed"] = "processed"
    owner: Annotated[str, Field(exclude=True)] = ""


def ordered_name() -> str:
    """Return a name that no one can guess; those made later sort after it."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def json_with_owner(kept: Any) -> str:
    """Return the JSON text of a model with the owner that its answers leave out."""
    return json.dumps({**kept.model_dump(mode="json"), "owner": kept.owner}, ensure_ascii=False)


class FileStore:
    """Files in a folder: ``ID`` holds the bytes, ``ID.json`` the `StoredFile`. One without the other is not there.

    Args:
        folder: made if it is missing.

    Attributes:
        folder: the same.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        found = [StoredFile.model_validate_json(path.read_bytes()) for path in folder.glob("file-*.json")]
        self._files = {each.id: each for each in sorted(found, key=lambda each: (each.created_at, each.id))}
        for path in folder.glob("file-*"):  # an upload that was cut short
            if path.suffix != ".json" and path.name not in self._files:
                path.unlink()

    async def add(self, chunks: AsyncIterator[bytes], filename: str, purpose: str) -> StoredFile:
        """Store a file. Raises OSError if it cannot be written; nothing of it is left then."""
        name = f"file-{ordered_name()}"
        path, num_bytes = self.folder / name, 0
        try:
            async with aiofiles.open(path, "xb") as file:
                async for chunk in chunks:
                    num_bytes += await file.write(chunk)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return self._note(name, num_bytes, filename, purpose, CALLER.get())

    def adopt(self, source: Path, name: str, filename: str, purpose: str, owner: str) -> StoredFile:
        """Take over a file of the same file system, which is moved here, in place of one of the same name."""
        num_bytes = source.stat().st_size
        source.replace(self.folder / name)
        return self._note(name, num_bytes, filename, purpose, owner)

    def get(self, name: str) -> StoredFile:
        """Return what is said of a file. Raises ApiError if the caller has none of this name."""
        if name not in self._files or not may_see(self._files[name].owner):
            raise ApiError(404, f"there is no file {name!r:.100}", code="file_not_found")
        return self._files[name]

    def path(self, name: str) -> Path:
        """Return the path of a file's bytes. Raises as `get`."""
        return self.folder / self.get(name).id

    def list(self, keep: Callable[[StoredFile], bool] = lambda file: True) -> "list[StoredFile]":
        """Return the caller's files that ``keep`` chooses, the newest first."""
        return [each for each in reversed(self._files.values()) if may_see(each.owner) and keep(each)]

    def remove(self, name: str) -> None:
        """Remove a file. Raises as `get`."""
        path = self.path(name)
        path.with_suffix(".json").unlink()
        path.unlink(missing_ok=True)
        del self._files[name]

    def _note(self, name: str, num_bytes: int, filename: str, purpose: str, owner: str) -> StoredFile:
        now = int(time.time())
        stored = StoredFile(id=name, bytes=num_bytes, created_at=now, filename=filename, purpose=purpose, owner=owner)
        sync_folder(self.folder)
        replace_file(self.folder / f"{name}.json", json_with_owner(stored))
        self._files[name] = stored
        return stored
