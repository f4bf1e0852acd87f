"""Appends rows to the output beside the computing, in the order in which they come."""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from zinfer.jobs.output import OutputFile

_MOST_AT_ONCE = 4096


class RowWriter:
    """A thread that writes rows, as many as have come since the last sync at once.

    Args:
        out: a file that is begun.
        on_written: told how many more rows are on the disk.

    The queue is `SimpleQueue`: whoever puts rows may be interrupted at any line.
    """

    def __init__(self, out: OutputFile, on_written: Callable[[int], None]) -> None:
        self._out = out
        self._on_written = on_written
        self._rows: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="zinfer-rows", daemon=True)
        self._thread.start()

    def put(self, row: Mapping[str, Any]) -> None:
        """Have a row written.

        Raises:
            JobError: an earlier row could not be.
        """
        self._rows.put(row)
        self._check()

    def close(self) -> None:
        """Wait until all rows are on the disk, or raise what `put` does. May be called again."""
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
            rows = [row for row in coming if row is not None]
            if not rows:
                continue
            try:
                self._out.append(rows)
                self._on_written(len(rows))
            except BaseException as failure:  # raised by put or close
                self._failure = failure
                return
