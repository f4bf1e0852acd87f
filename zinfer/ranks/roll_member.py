"""The other ranks' side of the roll call ([Note: who is there] in `zinfer.ranks.roll_call`)."""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final

from zinfer.errors import RankError
from zinfer.nvme.pool import start_thread
from zinfer.ranks.environment import RankEnvironment
from zinfer.ranks.roll_call import START_S, Roll
from zinfer.ranks.sockets import SILENCE_S, connect, greet, own_address, prove, receive, send

_PAUSE_S: Final = 0.05
_FIRST_TRY_S: Final = 30.0  # more than a name server, a connection and an answer take
_ANSWER_S: Final = 10.0


class RollMember:
    """Connects to rank 0, again and again until that listens, and stays connected.

    Args:
        own: this process, which is not rank 0.
        patience_s: after so many seconds, rank 0 is not waited for any more.
    """

    def __init__(self, own: RankEnvironment, patience_s: float) -> None:
        self._own, self._patience_s = own, patience_s
        self._began_s = time.monotonic()
        self._connection: Connection | None = None
        self._port = 0
        self._why = "it was not tried"
        self._is_heard = False  # something listens, which may be rank 0 while it imports
        self._is_over = threading.Event()
        self._found, self._is_tried = threading.Event(), threading.Event()
        start_thread("zinfer-roll-call", self._search, self._stop_search)

    def join(self) -> Roll:
        """Say that this rank is ready, and wait for the others.

        Raises:
            RankError: rank 0 cannot be reached, has refused this rank, or told that one is missing.
        """
        rest_s = self._patience_s + self._began_s - time.monotonic()
        if not self._found.wait(max(rest_s, 0.0)):
            self._is_tried.wait(_FIRST_TRY_S)
        if self._is_heard:
            self._found.wait(START_S)
        self._is_over.set()
        connection = self._connection
        if connection is None:
            raise RankError(
                f"rank 0 of {self._own.size} has not joined: {self._named()} could not reach it in "
                f"{self._patience_s:.0f} s ({self._why}); check MASTER_ADDR and MASTER_PORT"
            )
        try:
            with suppress(OSError):  # it is gone, and may have told why
                send(connection, ready=True)
            if not connection.poll(2 * START_S):
                raise RankError(f"rank 0 of {self._own.size} has not joined: no word from it for {2 * START_S} s")
            told = receive(connection)
        except (EOFError, OSError) as error:
            raise RankError(f"rank 0 of {self._own.size} has not joined: it ended or was killed") from error
        if "refused" in told:
            raise RankError(f"{self._named()} cannot join: {told['refused']}")
        if "lost" in told:
            raise RankError(told["lost"])
        roll = Roll(**told["roll"])
        return replace(roll, hosts=tuple(roll.hosts))

    def open_links(self, roll: Roll, number: int) -> list[Connection]:
        """Return one connection, to rank 0, which opens it too.

        Args:
            roll: what `join` returned.
            number: of earlier links.

        Raises:
            RankError: rank 0 is gone.
        """
        try:
            return [self._connect(self._port, what="link", link=number)]
        except (EOFError, OSError) as error:
            raise RankError(f"{self._named()} could not connect to rank 0 on {roll.hosts[0]}: {error}") from error

    def open_store(self) -> Connection:
        """Return a connection to what rank 0 keeps for all ranks.

        Raises:
            EOFError, OSError: rank 0 is gone.
        """
        return self._connect(self._port, what="store")

    def wait_found(self, timeout_s: float) -> bool:
        """Wait until rank 0 knows of this rank; whether it does."""
        return self._found.wait(timeout_s) and self._connection is not None

    def find_address(self, roll: Roll) -> str:
        """Return the address of this host that other hosts reach."""
        assert self._connection is not None
        return roll.first_address if self._own.host == roll.hosts[0] else own_address(self._connection)

    def find_lost(self, timeout_s: float) -> str | None:
        """Return which rank was lost, if rank 0 tells of one until the timeout, or is gone itself."""
        assert self._connection is not None
        try:
            return str(receive(self._connection)["lost"]) if self._connection.poll(timeout_s) else None
        except (EOFError, OSError):
            return f"rank 0 of {self._own.size} ended or was killed"

    def lost_ranks(self) -> frozenset[int]:
        """Return none: rank 0 sees the others' ends, and its store tells of them."""
        return frozenset()

    def _search(self) -> None:
        """Try the ports of rank 0 in turn."""
        while not self._is_over.is_set():
            for port in self._own.ports:
                try:
                    connection = self._connect(port, what="rank", host=self._own.host)
                    send(connection, here=True)
                except (EOFError, OSError) as error:
                    self._why = f"{self._own.address} port {port}: {str(error) or 'no rank 0 listens there'}"
                else:
                    self._connection, self._port = connection, port
                    self._found.set()
                    self._is_tried.set()
                    return
            self._is_tried.set()
            self._is_over.wait(_PAUSE_S)

    def _stop_search(self, failure: BaseException) -> None:
        """Let nobody wait until rank 0 is found."""
        self._why = f"{type(failure).__name__}: {failure}"
        self._found.set()
        self._is_tried.set()

    def _connect(self, port: int, **hello: Any) -> Connection:
        connection = connect(self._own.address, port)
        try:
            drawn = greet(connection, job=self._own.job, rank=self._own.rank, **hello)
            if not connection.poll(SILENCE_S if self._found.is_set() else _ANSWER_S):
                self._is_heard = True
                raise TimeoutError("no answer")
            prove(connection, self._own.key, drawn, receive(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _named(self) -> str:
        return f"rank {self._own.rank} on {self._own.host}"
