"""`Batches`: OpenAI's batches over a server: kept in files, computed in turn, and gone on with after any end."""

import asyncio
import logging
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput, manifest_path
from zinfer.nvme.whole_file import replace_file
from zinfer.serve.batch_job import BatchJob
from zinfer.serve.errors import ApiError
from zinfer.serve.file_store import FileStore, ordered_name
from zinfer.serve.service import Service

URLS: Final = ("/v1/chat/completions", "/v1/completions")
_WINDOW_S: Final = 24 * 3600
_UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
log = logging.getLogger("zinfer.serve")


class Batch(BaseModel):
    """A batch as OpenAI's interface shows it; times are seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = {"total": 0, "completed": 0, "failed": 0}
    metadata: dict[str, str] | None = None


class Batches:
    """Batches in a folder: ``ID.json`` is the `Batch`, ``rows/ID.jsonl`` its rows so far. One is computed at a time.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path, service: Service, files: FileStore) -> None:
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        self._folder, self._service, self._files = folder, service, files
        found = [Batch.model_validate_json(path.read_bytes()) for path in folder.glob("batch_*.json")]
        self._batches = {each.id: each for each in sorted(found, key=lambda each: each.id)}
        self._job: tuple[str, BatchJob] | None = None
        self._has_more = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, or go on with what an earlier server left."""
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop computing; the next server goes on."""
        if self._job is not None:
            self._job[1].stop()
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    def create(self, input_file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None) -> Batch:
        """Begin a batch. Raises ApiError if there is no such file or endpoint."""
        self._files.get(input_file_id)
        if endpoint not in URLS:
            raise ApiError(400, f"endpoint must be one of {', '.join(URLS)}, not {endpoint!r:.60}", param="endpoint")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{ordered_name()}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + _WINDOW_S,
            metadata=metadata,
        )
        self._keep(batch)
        self._has_more.set()
        return batch

    def get(self, name: str) -> Batch:
        """Return a batch with its present counts. Raises ApiError if there is none of this name."""
        if name not in self._batches:
            raise ApiError(404, f"there is no batch {name!r:.100}", code="batch_not_found")
        batch = self._batches[name]
        if self._job is not None and self._job[0] == name and (counts := self._job[1].counts)["total"]:
            batch.request_counts = counts
        return batch

    def list(self) -> "list[Batch]":
        """Return all batches, the newest first."""
        return [self.get(name) for name in reversed(self._batches)]

    def cancel(self, name: str) -> Batch:
        """End a batch; rows that are complete stay. Raises ApiError if it has ended, or there is none."""
        batch = self.get(name)
        if batch.status not in _UNFINISHED:
            raise ApiError(400, f"batch {name} is {batch.status} and cannot be cancelled")
        if batch.status in ("validating", "in_progress"):
            self._set(batch, "cancelling")
            if self._job is not None and self._job[0] == name:
                self._job[1].stop()
        return batch

    def progress(self) -> tuple[int, dict[str, int]]:
        """Return the number of unfinished batches, and the counts of the rows of the one under way."""
        counts = {} if self._job is None else self._job[1].counts
        return sum(each.status in _UNFINISHED for each in self._batches.values()), counts

    async def _run(self) -> None:
        while True:
            waiting = [each for each in self._batches.values() if each.status in _UNFINISHED]
            if waiting:
                await self._compute(waiting[0])
                continue
            self._has_more.clear()
            await self._has_more.wait()

    async def _compute(self, batch: Batch) -> None:
        """Compute a batch until it ends in one way or another."""
        rows = self._folder / "rows" / f"{batch.id}.jsonl"
        try:
            if batch.status in ("validating", "in_progress"):
                began = datetime.fromtimestamp(batch.created_at).astimezone()
                job = BatchJob(self._service, self._files.path(batch.input_file_id), rows, batch.endpoint, began)
                self._job = batch.id, job
                self._set(batch, "in_progress")
                await self._run_until(job, batch.expires_at)
            if batch.status == "in_progress":
                is_whole = (
                    sum(batch.request_counts[each] for each in ("completed", "failed"))
                    == (batch.request_counts["total"])
                )
                self._set(batch, "finalizing" if is_whole else "expired")
            await self._finalize(batch, rows)
            if batch.status != "expired":
                self._set(batch, "cancelled" if batch.status == "cancelling" else "completed")
        except Exception as error:  # the batch tells it, and the next one begins
            is_known = isinstance(error, UnusableInput | JobError | ApiError | OSError)
            log.warning("batch %s failed: %s", batch.id, error, exc_info=None if is_known else error)
            line = error.line if isinstance(error, UnusableInput) else None
            problem = {"code": "invalid_batch", "message": self._told(error), "param": None, "line": line}
            batch.errors = {"object": "list", "data": [problem]}
            self._set(batch, "failed")
        finally:
            self._job = None

    def _told(self, error: Exception) -> str:
        """Return the message of an error for clients: files have their names there, and not the server's folders."""
        message = str(error)
        for folder in (self._files.folder, self._folder / "rows", self._folder):
            message = message.replace(f"{folder}/", "")
        return message

    async def _run_until(self, job: BatchJob, expires_at: int) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(expires_at - time.time(), 0) + 1, job.stop)
        working = asyncio.create_task(asyncio.to_thread(job.run, loop))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            job.stop()
            await asyncio.wait((working,))
            raise
        finally:
            timer.cancel()
            assert self._job is not None
            self.get(self._job[0])

    async def _finalize(self, batch: Batch, rows: Path) -> None:
        """Make the output's and the errors' files of the rows."""
        if not rows.exists():
            return
        for kind, part in (await asyncio.to_thread(_divide, rows)).items():
            name = f"file-{batch.id.removeprefix('batch_')}-{kind}"  # the same if this is done again
            self._files.adopt(part, name, f"{batch.id}_{kind}.jsonl", "batch_output")
            setattr(batch, f"{kind}_file_id", name)
        self._keep(batch)
        rows.unlink()
        manifest_path(rows).unlink(missing_ok=True)

    def _set(self, batch: Batch, status: str) -> None:
        batch.status = status
        name = f"{status}_at"
        if getattr(batch, name, 0) is None:
            setattr(batch, name, int(time.time()))
        self._keep(batch)

    def _keep(self, batch: Batch) -> None:
        self._batches[batch.id] = batch
        replace_file(self._folder / f"{batch.id}.json", batch.model_dump_json())


def _divide(rows: Path) -> dict[str, Path]:
    """Write the rows that have answers, and those that have errors, to files of their own; empty ones are left out."""
    parts = {kind: rows.with_suffix(f".{kind}") for kind in ("output", "error")}
    with rows.open("rb") as source, parts["output"].open("wb") as output, parts["error"].open("wb") as errors:
        for line in source:
            (output if b'"response":{"status_code":200,' in line else errors).write(line)
    return {kind: part for kind, part in parts.items() if part.stat().st_size}
