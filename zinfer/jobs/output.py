"""The output file: locked by one job, appended in whole synced rows, and resumable after any crash.

A file that no zinfer job wrote is never overwritten, even with --restart.
"""

import errno
import fcntl
import json
import os
import queue
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from zinfer.errors import JobError
from zinfer.jobs.index import RowIndex
from zinfer.jobs.manifest import Manifest, OtherVersion, read_manifest, write_manifest
from zinfer.jobs.records import encode_row, read_record, read_token_ids
from zinfer.jobs.request import STANDARD_STREAM, UnusableInput, checksums_path, manifest_path
from zinfer.jobs.rows import RowState
from zinfer.nvme.pool import start_thread
from zinfer.nvme.whole_file import place_file, sync_folder

_MOST_AT_ONCE: Final = 4096
_READ_BYTES: Final = 1 << 14
_STDOUT, _STDERR = 1, 2


class OutputFile:
    """An output file under an exclusive lock, held until `close`. The kernel releases it when the process ends.

    is_begun: whether the file belongs to this job, so that rows may be appended.
    """

    def __init__(self, path: Path, *, restart: bool = False) -> None:
        """Create or open the file and lock it.

        Args:
            restart: the rows of an earlier job are to be discarded, so its manifest need not be usable.

        Raises:
            UnusableInput: it is not a writable file, or another process is writing it.
        """
        self.path = path
        self.is_begun = False
        self._manifest_path = manifest_path(path)
        self._size_bytes = 0
        self._index: RowIndex | None = None
        self._begins = array("q")  # [num_rows] where the row of each ordinal begins, as of `resume`; -1: nowhere
        self._created = not path.exists()
        self._descriptor = self._open_locked()
        self.manifest: Manifest | None = None
        self._is_ours = False
        try:
            self.manifest = read_manifest(self._manifest_path)
            self._is_ours = self.manifest is not None
        except JobError as error:
            self._is_ours = restart and isinstance(error, OtherVersion)
            if not self._is_ours:
                os.close(self._descriptor)
                raise UnusableInput(str(error)) from error

    def close(self) -> None:
        """Release the lock; remove the file if this job created it and wrote nothing."""
        if self._created and self.manifest is None and os.fstat(self._descriptor).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def check_same_job(self, now: Manifest) -> None:
        """Raise UnusableInput unless the file is new, empty, or belongs to the job that `now` describes."""
        if self.manifest is None:
            self.check_ours()
        elif differences := self.manifest.differences(now):
            listed = "".join(f"\n  {line}" for line in differences)
            raise UnusableInput(
                f"output {self.path} belongs to another job; what differs:{listed}\n"
                "Use the former settings to go on with that job, --restart to discard its rows, or another --output."
            )

    def check_ours(self) -> None:
        """Raise UnusableInput if the file is not empty and has no manifest of a zinfer job."""
        if not self._is_ours and os.fstat(self._descriptor).st_size:
            raise UnusableInput(
                f"output {self.path} exists and has no manifest ({self._manifest_path.name}), so it is not a zinfer "
                "job's and is left as it is (with --restart too); give another --output or move the file away"
            )

    def begin(self, manifest: Manifest) -> None:
        """Empty the file and write its manifest; raises like `check_ours`."""
        self.check_ours()
        try:
            self._cut(0)
        except OSError as error:
            raise self._write_error(error) from error
        self.keep(manifest)
        self.is_begun = True

    def keep(self, manifest: Manifest) -> None:
        """Write the manifest, replacing the former one."""
        write_manifest(self._manifest_path, manifest)
        self.manifest, self._is_ours = manifest, True

    def keep_order(self, index: RowIndex) -> None:
        """Let `finish` put the rows in the order of the input."""
        self._index = index

    def finish(self) -> None:
        """Check that the rows are as written, put them in order, if they are to be, and remove the weights' checksums.

        Raises:
            JobError: the file was altered, or cannot be written.
        """
        self.check_unaltered()
        if self._index is not None:
            self._order(self._index)
        checksums_path(self.path).unlink(missing_ok=True)

    def _order(self, index: RowIndex) -> None:
        self.resume(index)
        if any(earlier > later for earlier, later in pairwise(self._begins)):
            try:
                place_file(self.path.resolve(), map(self._line_at, self._begins))
            except OSError as error:
                raise self._write_error(error) from error

    def resume(self, index: RowIndex) -> tuple[bytearray, int]:
        """Find the rows that the file holds, and drop a torn last line.

        Returns:
            [num_rows] RowState by ordinal, and the size of the torn line in bytes.

        Raises:
            UnusableInput: this job cannot have written one of the lines.
        """
        states, whole_bytes, ordinal = bytearray(index.num_rows), 0, -1
        self._begins = array("q", [-1]) * index.num_rows
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    ordinal, state = _read_row(line, index, ordinal + 1)
                    if states[ordinal]:
                        raise ValueError("an id that an earlier line already has")
                except ValueError as error:
                    raise UnusableInput(
                        f"output {self.path} line {number} holds {error}: it was changed since. Remove the lines from "
                        "there on (their rows are computed again) or use --restart"
                    ) from error
                states[ordinal], self._begins[ordinal] = state, whole_bytes
                whole_bytes += len(line)
        torn_bytes = os.fstat(self._descriptor).st_size - whole_bytes
        if torn_bytes:
            self._cut(whole_bytes)
        self._size_bytes = whole_bytes
        self.is_begun = True
        return states, torn_bytes

    def token_ids_of(self, ordinal: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the tokens of each completion in a row that `resume` found; None if it does not have them.

        Raises:
            JobError: the file cannot be read, or was changed since.
        """
        begin = self._begins[ordinal]
        try:
            return read_token_ids(json.loads(self._line_at(begin)))
        except OSError as error:
            raise JobError(f"output {self.path} cannot be read: {error.strerror} (errno {error.errno})") from error
        except (ValueError, RecursionError) as error:
            raise JobError(
                f"output {self.path} was changed while the job ran: at byte {begin} no row begins ({error}). Put back "
                "what was there, if you can, and run the same command again"
            ) from error

    def _line_at(self, begin: int) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            part = os.pread(self._descriptor, _READ_BYTES, begin + len(line))
            if not part:
                raise ValueError("it has no end")
            line += part[: part.find(b"\n") + 1 or None]
        return line

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows and sync them to disk.

        Raises:
            JobError: the disk is full or failed, or the file was altered. Whole rows are kept; a partial row is
                dropped.
        """
        self.check_unaltered()
        data = memoryview(b"".join(encode_row(row) for row in rows))
        num_written = 0
        try:
            os.lseek(self._descriptor, 0, os.SEEK_END)
            while num_written < len(data):
                num_written += os.write(self._descriptor, data[num_written:])
            os.fsync(self._descriptor)
        except OSError as error:
            # If fsync failed after all writes, the rows may never reach the disk.
            whole_bytes = 0 if num_written == len(data) else bytes(data[:num_written]).rfind(b"\n") + 1
            with suppress(OSError):  # the next run drops a torn line as well
                os.ftruncate(self._descriptor, self._size_bytes + whole_bytes)
            raise self._write_error(error) from error
        self._size_bytes += len(data)

    def check_unaltered(self) -> None:
        """Raise JobError if the file was replaced or its size changed since the last append.

        A manifest that was removed is written again, since without it no run could go on; this too is a JobError.
        """
        try:
            found = os.stat(self.path)
            num_bytes = found.st_size if os.path.samestat(found, os.fstat(self._descriptor)) else -1
        except OSError:
            num_bytes = -1
        if num_bytes != self._size_bytes:
            how = "removed or replaced" if num_bytes < 0 else f"changed to {num_bytes} bytes from {self._size_bytes}"
            raise JobError(
                f"output {self.path} was {how} while the job ran. Put back what was there, if you can, and run the "
                "same command again: whole rows are kept and the others computed"
            )
        if self.manifest is not None and not self._manifest_path.exists():
            self.keep(self.manifest)
            raise JobError(
                f"manifest {self._manifest_path} was removed while the job ran, and has been written again. Run the "
                "same command again to go on: whole rows are kept and the others computed"
            )

    def _cut(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        os.fsync(self._descriptor)
        self._size_bytes = num_bytes

    def _open_locked(self) -> int:
        path = self.path
        try:
            if path.exists() and not path.is_file():
                raise UnusableInput(f"output {path} is not a regular file")
            while True:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # A job that ended between open and flock may have unlinked this file.
                    if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                        sync_folder(path.parent)
                        return descriptor
                except OSError:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        except BlockingIOError as error:
            raise UnusableInput(f"output {path} is being written by another process; wait for it or end it") from error
        except OSError as error:
            raise UnusableInput(
                f"output {path} cannot be written: {error.strerror} (errno {error.errno}); "
                "give an --output in a folder that exists and may be written, on a file system with locks"
            ) from error

    def _write_error(self, error: OSError) -> JobError:
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "check the disk"
        return JobError(
            f"output {self.path} cannot be written: {error.strerror} (errno {error.errno}). The rows in it are whole; "
            f"{remedy} and run the same command again to go on"
        )


class Stdout:
    """Stdout as the output of a job: rows alone. What else is printed there before `close` goes to stderr.

    It has the methods of an `OutputFile`; no other run goes on from it.
    """

    def __init__(self) -> None:
        self.path, self.is_begun = STANDARD_STREAM, False
        self.manifest: Manifest | None = None
        self._index: RowIndex | None = None
        self._waiting: dict[int, bytes] = {}
        self._next = 0  # ordinal of the row to write, if they are in order
        sys.stdout.flush()
        self._descriptor = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)

    def close(self) -> None:
        """Give stdout back."""
        sys.stdout.flush()
        os.dup2(self._descriptor, _STDOUT)
        os.close(self._descriptor)

    def check_same_job(self, now: Manifest) -> None:
        """Do nothing: there are no earlier rows."""

    def check_ours(self) -> None:
        """Do nothing: there are no earlier rows."""

    def begin(self, manifest: Manifest) -> None:
        self.manifest, self.is_begun = manifest, True

    def keep(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def resume(self, index: RowIndex) -> tuple[bytearray, int]:
        return bytearray(index.num_rows), 0

    def token_ids_of(self, ordinal: int) -> tuple[tuple[int, ...], ...] | None:
        return None

    def keep_order(self, index: RowIndex) -> None:
        """Hold each row back, in memory, until those before it are written."""
        self._index = index

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows.

        Raises:
            JobError: nobody reads stdout any more, or what it goes to is full.
        """
        data = b"".join(self._in_order(self._index, rows) if self._index else map(encode_row, rows))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise JobError(f"stdout cannot be written: {error.strerror} (errno {error.errno})") from error

    def _in_order(self, index: RowIndex, rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        for row in rows:
            ordinal = index.ordinal_of(read_record(row)[0], self._next)
            assert ordinal is not None
            self._waiting[ordinal] = encode_row(row)
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1

    def check_unaltered(self) -> None:
        """Do nothing: what is written is gone."""

    def finish(self) -> None:
        assert not self._waiting


Output: TypeAlias = OutputFile | Stdout


class RowWriter:
    """Writes rows in order on its own thread, and syncs them in groups.

    Args:
        out: a file that is begun.
        on_written: called with the number of rows just written.
        before: called before rows are written; writes what must be on the disk by then.
    """

    def __init__(
        self, out: Output, on_written: Callable[[int], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self._out, self._on_written, self._before = out, on_written, before
        # `put` may be interrupted by a signal at any line, which a SimpleQueue survives.
        self._rows: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = start_thread("zinfer-rows", self._write, self._fail)

    def put(self, row: Mapping[str, Any]) -> None:
        """Queue a row for writing.

        Raises:
            JobError: an earlier row could not be written.
        """
        self._rows.put(row)
        self._check()

    def close(self) -> None:
        """Wait until all rows are on the disk; raises like `put`. May be called again."""
        self._rows.put(None)
        try:
            self._thread.join()
        finally:  # interrupted: the file must not be closed under the thread
            self._thread.join()
        self._check()

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self) -> None:
        is_open = True
        while is_open:
            coming = [self._rows.get()]
            while len(coming) < _MOST_AT_ONCE and not self._rows.empty():
                coming.append(self._rows.get())
            is_open = None not in coming
            if rows := [row for row in coming if row is not None]:
                self._before()
                self._out.append(rows)
                self._on_written(len(rows))

    def _fail(self, failure: BaseException) -> None:
        """Let `put` or `close` raise an error."""
        self._failure = failure


def _read_row(line: bytes, index: RowIndex, guess: int) -> tuple[int, RowState]:
    """Return the ordinal and state of an output row. Raises ValueError with a description of the line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON ({error})") from error
    row_id, is_error = read_record(row)
    ordinal = index.ordinal_of(row_id, guess)
    if ordinal is None:
        raise ValueError(f"the id {row_id!r}, which the input does not have")
    return ordinal, RowState.FAILED if is_error else RowState.DONE
