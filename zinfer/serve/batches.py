"""`Batches`: OpenAI's batches over a server: kept in files, computed in turn, and gone on with after any end."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput, manifest_path
from zinfer.jobs.rows import RowId
from zinfer.nvme.whole_file import replace_file
from zinfer.serve.batch import URLS, Batch
from zinfer.serve.batch_job import BatchJob, suspects_path
from zinfer.serve.batch_rows import count_rows, divide, missing_rows
from zinfer.serve.caller import CALLER, may_see
from zinfer.serve.errors import ApiError
from zinfer.serve.file_store import FileStore, json_with_owner, ordered_name, read_kept
from zinfer.serve.service import Service
from zinfer.serve.tasks import lasting

_WINDOW_S: Final = 24 * 3600
_LOOK_EVERY_S: Final = 0.2
log = logging.getLogger("zinfer.serve")


class Batches:
    """Batches in a folder: ``ID.json`` is the `Batch`, ``rows/ID.jsonl`` its rows so far. One is computed at a time.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path, service: Service, files: FileStore) -> None:
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        self._folder, self._service, self._files = folder, service, files
        for path in folder.glob(".batch_*.tmp"):  # the server was killed as it wrote it
            path.unlink()
        found = [read_kept(path, Batch) for path in folder.glob("batch_*.json")]
        self._batches = {each.id: each for each in sorted(found, key=lambda each: each.id)}
        self._job: tuple[str, BatchJob] | None = None
        self._has_more = asyncio.Event()
        self._keeping = asyncio.Lock()
        self._busy: set[str] = set()
        self._counted = ""
        self._tasks: list[asyncio.Task[None]] = []
        for batch in self._batches.values():
            if batch.is_unfinished and self._rows(batch).exists():
                counts = count_rows(self._rows(batch))
                total = max(batch.request_counts["total"], sum(counts.values()))
                batch.request_counts = {"total": total, **counts}

    def start(self) -> None:
        """Begin, or go on with what an earlier server left."""
        works = {"the computing of batches": self._run, "the look after batches": self._look_after_others}
        self._tasks = [asyncio.create_task(lasting(what, work)) for what, work in works.items()]

    async def close(self) -> None:
        """Stop computing; the next server goes on."""
        if self._job is not None:
            self._job[1].stop()
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def create(self, input_file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None) -> Batch:
        """Begin a batch; it is on the disk then.

        Raises:
            ApiError: there is no such file or endpoint.
            OSError: it cannot be written; there is none then.
        """
        self._files.path(input_file_id)
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
        self._busy.add(batch.id)  # it does not begin yet, but its input must stay
        self._batches[batch.id] = batch
        try:
            await self._keep(batch)
        except BaseException:
            del self._batches[batch.id]
            raise
        finally:
            self._busy.discard(batch.id)
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

    async def cancel(self, name: str) -> Batch:
        """End a batch; rows that are complete stay. Raises ApiError if it has ended, or there is none."""
        batch = self.get(name)
        if not batch.is_unfinished:
            raise ApiError(400, f"batch {name} is {batch.status} and cannot be cancelled")
        if batch.status in ("validating", "in_progress"):
            if self._job is not None and self._job[0] == name:
                self._job[1].stop()
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            shown = batch.model_copy()  # it may be cancelled by the time that this is written
            await self._keep(batch)
            return shown
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
        while True:
            waiting = [each for each in self._batches.values() if each.is_unfinished and each.id not in self._busy]
            if waiting:
                await self._end(waiting[0], self._compute(waiting[0]))
                continue
            self._has_more.clear()
            await self._has_more.wait()

    async def _look_after_others(self) -> None:
        """End batches that wait once they are cancelled or out of time, and keep the counts of the one under way."""
        for batch in [each for each in self._batches.values() if not each.is_unfinished and self._rows(each).exists()]:
            await self._end(batch, self._finish(batch, batch.status))  # an earlier server had no room for them
        while True:
            for batch in list(self._batches.values()):
                if batch.is_unfinished and batch.id not in self._busy:
                    if batch.status == "cancelling":
                        await self._end(batch, self._finish(batch, "cancelled"))
                    elif batch.status != "finalizing" and time.time() > batch.expires_at:
                        await self._end(batch, self._finish(batch, "expired"))
            if self._job is not None and self._job[1].counts["total"] and self._counted != self._job[0]:
                self._counted = self._job[0]
                with suppress(OSError):
                    await self._keep(self.get(self._counted))  # so that they do not fall if the server is killed
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _end(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        """Do work that ends a batch in one way or another."""
        self._busy.add(batch.id)
        try:
            await work
        except Exception as error:  # the batch tells it, and the next one begins
            is_known = isinstance(error, UnusableInput | JobError | ApiError | OSError)
            log.warning("batch %s failed: %s", batch.id, error, exc_info=None if is_known else error)
            await self._fail(batch, error)
        finally:
            self._job = None if self._job is not None and self._job[0] == batch.id else self._job
            self._busy.discard(batch.id)

    async def _compute(self, batch: Batch) -> None:
        if batch.status in ("validating", "in_progress"):
            began = datetime.fromtimestamp(batch.created_at).astimezone()
            job = BatchJob(self._service, self._input(batch), self._rows(batch), batch.endpoint, began)
            self._job = batch.id, job
            await self._set(batch, "in_progress")
            await self._run_until(job, batch.expires_at)
        if batch.status == "cancelling":
            await self._finish(batch, "cancelled")
            return
        if batch.status == "in_progress":
            await self._set(batch, "finalizing")
        await self._finish(batch, "completed" if batch.is_whole else "expired")

    def _rows(self, batch: Batch) -> Path:
        return self._folder / "rows" / f"{batch.id}.jsonl"

    def _input(self, batch: Batch) -> Path:
        try:
            return self._files.path(batch.input_file_id)
        except ApiError as error:
            remedy = "upload it again, and create another batch"
            problem = f"the input {batch.input_file_id} was deleted before it was computed; {remedy}"
            raise JobError(problem if error.status == HTTPStatus.NOT_FOUND else error.message) from None

    async def _fail(self, batch: Batch, error: Exception) -> None:
        """End a batch by an error; the rows that it has so far are handed out."""
        line = error.line if isinstance(error, UnusableInput) else None
        problem = {"code": "invalid_batch", "message": self._told(error), "param": None, "line": line}
        batch.errors = {"object": "list", "data": [problem]}
        try:
            await self._finish(batch, "failed")
            return
        except OSError as again:  # the disk is full, for instance
            log.warning("batch %s: its rows stay in %s until the next start: %s", batch.id, self._rows(batch), again)
        with suppress(OSError):  # else the next server goes on with it
            await self._set(batch, "failed")

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

    async def _finish(self, batch: Batch, status: str) -> None:
        """End a batch: make the output's and the errors' files of its rows, and count these."""
        rows = self._rows(batch)
        has_files = not batch.is_unfinished and (batch.output_file_id or batch.error_file_id) is not None
        expired = await self._expired(batch) if status == "expired" and not has_files else []
        if not has_files and (expired or rows.exists()):
            parts, counts = await asyncio.to_thread(divide, rows, expired)
            for kind, part in parts.items():
                name = f"file-{batch.id.removeprefix('batch_')}-{kind}"  # the same if this is done again
                await self._files.adopt(part, name, f"{batch.id}_{kind}.jsonl", "batch_output", batch.owner)
                setattr(batch, f"{kind}_file_id", name)
            total = max(batch.request_counts["total"], sum(counts.values()) + len(expired))
            batch.request_counts = {"total": total, **counts}
        await self._set(batch, status)
        rows.unlink(missing_ok=True)
        manifest_path(rows).unlink(missing_ok=True)
        suspects_path(rows).unlink(missing_ok=True)

    async def _expired(self, batch: Batch) -> Sequence[RowId]:
        try:
            return await asyncio.to_thread(missing_rows, self._input(batch), self._rows(batch))
        except (JobError, OSError) as error:  # it was no batch; nobody has looked before
            log.warning("batch %s: its rows cannot be told: %s", batch.id, error)
            return []

    async def _set(self, batch: Batch, status: str) -> None:
        batch.status = status
        name = f"{status}_at"
        if getattr(batch, name, 0) is None:
            setattr(batch, name, int(time.time()))
        await self._keep(batch)

    async def _keep(self, batch: Batch) -> None:
        async with self._keeping:  # the last state is written last
            await asyncio.to_thread(replace_file, self._folder / f"{batch.id}.json", json_with_owner(batch))
