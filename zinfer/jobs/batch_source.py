"""`BatchSource`: a job's batches, handed out to several threads."""

import threading
from collections.abc import Generator

from zinfer.jobs.prompts import Batch


class BatchSource:
    """Hands out each batch once, to several threads."""

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches, self._lock = batches, threading.Lock()

    def next(self) -> Batch | None:
        """Return the next batch, None after the last."""
        with self._lock:
            return next(self._batches, None)

    def close(self) -> None:
        """Hand out no further batch; waits for one that is being handed out."""
        with self._lock:
            self._batches.close()
