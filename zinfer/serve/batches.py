"""`Batches`: OpenAI's batches over a server: kept in files, computed in turn, and gone on with after any end."""

import asyncio
import logging
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput, manifest_path
from zinfer.nvme.whole_file import replace_file
from zinfer.serve.batch import URLS, Batch
from zinfer.serve.batch_job import BatchJob
from zinfer.serve.batch_rows import divide
from zinfer.serve.caller import CALLER, may_see
from zinfer.serve.errors import ApiError
from zinfer.serve.file_store import FileStore, json_with_owner, ordered_name
from zinfer.serve.service import Service

_WINDOW_S: Final = 24 * 3600
log = logging.getLogger("zinfer.serve")


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
            owner=CALLER.get(),
        )
        self._keep(batch)
        self._has_more.set()
        return batch

    def get(self, name: str) -> Batch:
        """Return a batch with its present counts. Raises ApiError if the caller has none of this name."""
        if name not in self._batches or not may_see(self._batches[name].owner):
            raise ApiError(404, f"there is no batch {name!r:.100}", code="batch_not_found")
        batch = self._batches[name]
        if self._job is not None and self._job[0] == name and (counts := self._job[1].counts)["total"]:
            batch.request_counts = counts
        return batch

    def list(self) -> "list[Batch]":
        """Return the caller's batches, the newest first."""
        return [self.get(name) for name, each in reversed(self._batches.items()) if may_see(each.owner)]

    def cancel(self, name: str) -> Batch:
        """End a batch; rows that are complete stay. Raises ApiError if it has ended, or there is none."""
        batch = self.get(name)
        if not batch.is_unfinished:
            raise ApiError(400, f"batch {name} is {batch.status} and cannot be cancelled")
        if batch.status in ("validating", "in_progress"):
            self._set(batch, "cancelling")
            if self._job is not None and self._job[0] == name:
                self._job[1].stop()
        return batch

    def check_unused(self, file: str) -> None:
        """Raise ApiError if a batch that has not ended reads this file."""
        for batch in self._batches.values():
            if batch.is_unfinished and batch.input_file_id == file:
                remedy = f"wait for batch {batch.id}, which is {batch.status} and reads it, or cancel it"
                raise ApiError(409, f"the file {file} is in use; {remedy}", code="file_in_use")

    def progress(self) -> tuple[int, dict[str, int]]:
        """Return the number of unfinished batches, and the counts of the rows of the one under way."""
        counts = {} if self._job is None else self._job[1].counts
        return sum(each.is_unfinished for each in self._batches.values()), counts

    async def _run(self) -> None:
        for batch in [each for each in self._batches.values() if not each.is_unfinished]:
            with suppress(OSError):  # what an earlier server had no room for
                await self._hand_out(batch)
        while True:
            waiting = [each for each in self._batches.values() if each.is_unfinished]
            if waiting:
                await self._compute(waiting[0])
                continue
            self._has_more.clear()
            await self._has_more.wait()

    async def _compute(self, batch: Batch) -> None:
        """Compute a batch until it ends in one way or another."""
        rows = self._rows(batch)
        try:
            if batch.status in ("validating", "in_progress"):
                began = datetime.fromtimestamp(batch.created_at).astimezone()
                job = BatchJob(self._service, self._input(batch), rows, batch.endpoint, began)
                self._job = batch.id, job
                self._set(batch, "in_progress")
                await self._run_until(job, batch.expires_at)
            if batch.status == "in_progress":
                is_whole = (
                    sum(batch.request_counts[each] for each in ("completed", "failed"))
                    == (batch.request_counts["total"])
                )
                self._set(batch, "finalizing" if is_whole else "expired")
            await self._hand_out(batch)
            if batch.status != "expired":
                self._set(batch, "cancelled" if batch.status == "cancelling" else "completed")
        except Exception as error:  # the batch tells it, and the next one begins
            is_known = isinstance(error, UnusableInput | JobError | ApiError | OSError)
            log.warning("batch %s failed: %s", batch.id, error, exc_info=None if is_known else error)
            await self._fail(batch, error)
        finally:
            self._job = None

    def _rows(self, batch: Batch) -> Path:
        return self._folder / "rows" / f"{batch.id}.jsonl"

    def _input(self, batch: Batch) -> Path:
        try:
            return self._files.path(batch.input_file_id)
        except ApiError:
            remedy = "upload it again, and create another batch"
            raise JobError(f"the input {batch.input_file_id} was deleted before it was computed; {remedy}") from None

    async def _fail(self, batch: Batch, error: Exception) -> None:
        """End a batch by an error; the rows that it has so far are handed out."""
        line = error.line if isinstance(error, UnusableInput) else None
        problem = {"code": "invalid_batch", "message": self._told(error), "param": None, "line": line}
        batch.errors = {"object": "list", "data": [problem]}
        try:
            await self._hand_out(batch)
        except OSError as again:  # the disk is full, for instance
            log.warning("batch %s: its rows stay in %s until the next start: %s", batch.id, self._rows(batch), again)
        try:
            self._set(batch, "failed")
        except OSError as again:
            log.warning("batch %s goes on with the next start: %s", batch.id, again)

    def _told(self, error: Exception) -> str:
        """Return the message of an error for clients: files have their names there, and not the server's folders."""
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename} cannot be used: {error.strerror} (errno {error.errno})"
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

    async def _hand_out(self, batch: Batch) -> None:
        """Make the output's and the errors' files of the rows, and count these."""
        rows = self._rows(batch)
        if not rows.exists():
            return
        parts, counts = await asyncio.to_thread(divide, rows)
        for kind, part in parts.items():
            name = f"file-{batch.id.removeprefix('batch_')}-{kind}"  # the same if this is done again
            self._files.adopt(part, name, f"{batch.id}_{kind}.jsonl", "batch_output", batch.owner)
            setattr(batch, f"{kind}_file_id", name)
        batch.request_counts = {"total": max(batch.request_counts["total"], sum(counts.values())), **counts}
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
        replace_file(self._folder / f"{batch.id}.json", json_with_owner(batch))
