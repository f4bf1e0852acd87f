"""Tells systemd that the server takes requests, that it lives, and that it ends (`sd_notify`)."""

import asyncio
import os
import socket
from contextlib import suppress
from typing import Final

_MOST_PAUSE_S: Final = 10.0


class ServiceManager:
    """The service manager that has started this process, if it wants to be told.

    Reads ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC``; without the former nothing is sent.
    """

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        watched_s = int(os.environ.get("WATCHDOG_USEC") or 0) / 1e6
        self._pause_s = min(watched_s / 2, _MOST_PAUSE_S)

    async def watch(self) -> None:
        """Tell that the server takes requests, then again and again that its event loop runs, until cancelled."""
        self._tell("READY=1")
        try:
            while self._pause_s:
                self._tell("WATCHDOG=1")
                await asyncio.sleep(self._pause_s)
            await asyncio.Event().wait()
        finally:
            self._tell("STOPPING=1")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        # Not blocking: a manager that is gone, or reads too slowly, must not stop the server.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sending, suppress(OSError):
            sending.sendto(state.encode(), path)
