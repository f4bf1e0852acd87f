"""`FileStore`: files that clients have uploaded, and those that batches have written, each with what is said of it."""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, Literal

import aiofiles
from pydantic import BaseModel

from zinfer.nvme.whole_file import replace_file, sync_folder
from zinfer.serve.errors import ApiError

_CHUNK_BYTES: Final = 1 << 20


class StoredFile(BaseModel):
    """A file as OpenAI's interface shows it; times are seconds since the epoch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


def ordered_name() -> str:
    """Return a name that no one can guess; those made later sort after it."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


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
        return self._note(name, num_bytes, filename, purpose)

    def adopt(self, source: Path, name: str, filename: str, purpose: str) -> StoredFile:
        """Take over a file of the same file system, which is moved here, in place of one of the same name."""
        num_bytes = source.stat().st_size
        source.replace(self.folder / name)
        return self._note(name, num_bytes, filename, purpose)

    def get(self, name: str) -> StoredFile:
        """Return what is said of a file. Raises ApiError if there is none of this name."""
        if name not in self._files:
            raise ApiError(404, f"there is no file {name!r:.100}", code="file_not_found")
        return self._files[name]

    def path(self, name: str) -> Path:
        """Return the path of a file's bytes. Raises as `get`."""
        return self.folder / self.get(name).id

    def list(self, keep: Callable[[StoredFile], bool] = lambda file: True) -> "list[StoredFile]":
        """Return the files that ``keep`` chooses, the newest first."""
        return [each for each in reversed(self._files.values()) if keep(each)]

    def remove(self, name: str) -> None:
        """Remove a file. Raises as `get`."""
        path = self.path(name)
        path.with_suffix(".json").unlink()
        path.unlink(missing_ok=True)
        del self._files[name]

    def _note(self, name: str, num_bytes: int, filename: str, purpose: str) -> StoredFile:
        stored = StoredFile(id=name, bytes=num_bytes, created_at=int(time.time()), filename=filename, purpose=purpose)
        sync_folder(self.folder)
        replace_file(self.folder / f"{name}.json", stored.model_dump_json())
        self._files[name] = stored
        return stored
