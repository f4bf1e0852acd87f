"""One other rank of a job, as rank 0 knows it."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

from zinfer.jobs.messages import Hello, Left, Ready
from zinfer.jobs.progress import Load
from zinfer.jobs.prompts import Prompt
from zinfer.offload.stats import RunStats
from zinfer.ranks.sockets import end_link
from zinfer.ranks.values import to_bytes

_LEAVE_S: Final = 2.0


class Peer:
    """One other rank, as rank 0 knows it.

    Attributes:
        name: for messages.
        prompts, missing: its current batch, as of `Batch` and `Records.begin_batch`.
    """

    def __init__(self, rank: int, host: str, link: Connection) -> None:
        self.rank, self.name, self.link = rank, f"rank {rank} on {host}", link
        self.hello: Hello | None = None
        self.ready: Ready | None = None
        self.load = Load()
        self.prompts: tuple[Prompt, ...] = ()
        self.missing: Mapping[int, int] = {}
        self.is_busy = self.is_ended = self.has_failed = self.owes_sums = False
        self.stats: RunStats | None = None
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; called by any thread.

        Raises:
            OSError: the rank is gone.
        """
        with self._sending:
            self.link.send_bytes(to_bytes(message))

    def leave(self) -> None:
        """Say that rank 0 ends, unless another message has been on its way for long, and end the connection."""
        if self._sending.acquire(timeout=_LEAVE_S):
            with suppress(OSError):  # gone itself
                self.link.send_bytes(to_bytes(Left()))
            self._sending.release()
        end_link(self.link)
