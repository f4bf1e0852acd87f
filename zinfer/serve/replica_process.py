"""The process of one replica: how the server starts it, waits for it and kills it.

[Note: replicas start first] A server starts its replicas before it imports anything that takes long, so that all of
them import at the same time. A replica that has imported waits for its socket, which the server opens once it has found
nothing wrong with its own settings: until then a replica says nothing and touches no device.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from zinfer.nvme.temporary_folder import is_in_use, temporary_folder

_REPLICA: Final = "ZINFER_REPLICA"
"""Names the replica in the environment of its processes: ranks have sessions of their own, and outlive their parent."""
_KILLED_S: Final = 30.0
_PAUSE_S: Final = 0.02


class ReplicaProcess:
    """A process that computes for a server, which may be started again once it has ended.

    Args:
        command: words that start it; ``--socket PATH`` is added.
        socket: where it reaches the server, in the server's temporary folder; private to this user.
    """

    def __init__(self, command: Sequence[str], socket: Path) -> None:
        self.socket = socket
        self._command = command
        self._started: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it is started and was not killed since."""
        if self._started is None:
            self._started = subprocess.Popen(
                [*self._command, "--socket", str(self.socket)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, _REPLICA: str(self.socket)},
            )

    async def wait(self) -> int:
        """Return the exit code of the started process once it has ended; a signal's number is negative."""
        assert self._started is not None
        if self._started.poll() is None:
            loop, ended, file = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(self._started.pid)
            loop.add_reader(file, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(file)
                os.close(file)
        return self._started.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._started is not None:
            self._started.send_signal(number)

    def kill(self) -> None:
        """Kill it and the ranks that are left, which may hold a GPU's memory, and wait until they are gone."""
        if self._started is None:
            return
        self._started.kill()
        self._started.wait()
        self._started = None
        killed = []
        for each in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is another user's
                if each.environ().get(_REPLICA) == str(self.socket):
                    each.kill()
                    killed.append(each)
        psutil.wait_procs(killed, _KILLED_S)


@contextmanager
def started_replicas(command: Sequence[str], number: int) -> Iterator[list[ReplicaProcess]]:
    """Start the replicas of a server; at the end those that are left are killed."""
    with temporary_folder("serve") as folder:
        replicas = [ReplicaProcess(command, folder / f"replica-{index}.sock") for index in range(number)]
        try:
            for each in replicas:
                each.start()
            yield replicas
        finally:
            for each in replicas:
                each.kill()


def wait_for_server(socket: Path) -> bool:
    """Wait until a server listens on its socket; whether it lives."""
    while not socket.exists():
        if not is_in_use(socket.parent):
            return False
        time.sleep(_PAUSE_S)
    return True
