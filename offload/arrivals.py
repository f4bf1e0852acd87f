"""Counts the bytes that streaming has brought: those of blocks that compute has come to use, no guess ahead of it."""

import threading
from collections import deque
from typing import Final

from zinfer.offload.source import Source
from zinfer.offload.stream import Event

_MOST_OPEN: Final = 4096  # arrivals whose events are not looked at yet


class Arrivals:
    """Sums over blocks that have arrived.

    A copy that is enqueued has not crossed the link yet, so a block counts once its event is reached.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # another thread may ask for the sums
        self._open: deque[tuple[Event, int, int]] = deque()  # no sources: they hold memory
        self._wire_bytes = 0
        self._read_bytes = 0

    def note(self, event: Event, source: Source) -> None:
        """Count the block of ``source`` once ``event`` is reached."""
        self._open.append((event, source.wire_bytes, source.read_bytes))
        if len(self._open) > _MOST_OPEN:
            self.sums()

    def sums(self) -> tuple[int, int]:
        """Bytes copied to the device, and bytes read from the disk for them."""
        with self._lock:
            while self._open and self._open[0][0].is_reached():
                _, wire_bytes, read_bytes = self._open.popleft()
                self._wire_bytes += wire_bytes
                self._read_bytes += read_bytes
            return self._wire_bytes, self._read_bytes
