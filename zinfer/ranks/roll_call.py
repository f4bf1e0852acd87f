"""Rank 0's side of the roll call, by which the ranks of a job find each other.

[Note: who is there]
Each process connects to rank 0 first of all, before it imports torch, and says that it is ready once it joins. One that
imports for minutes keeps its connection and is waited for; one that is killed loses it at once, and one whose host is
gone within `SILENCE_S` (`zinfer.ranks.sockets`). Rank 0 tells the others, so that all name the rank that is missing.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from zinfer.errors import RankError
from zinfer.nvme.pool import start_thread
from zinfer.ranks.environment import RankEnvironment
from zinfer.ranks.rank_store import StoredValues
from zinfer.ranks.sockets import accepted, demand, listen, own_address, receive, send

log = logging.getLogger("zinfer")

START_S: Final = 300
"""In which a process that is there has imported what it needs."""
_LEAST_S: Final = 5.0  # for what has come meanwhile to be read


@dataclass(frozen=True)
class Roll:
    """What all ranks know once all are ready.

    Attributes:
        hosts: their host names, by rank.
        first_address: of rank 0's host, as other hosts reach it.
        meeting: where the ranks make torch's group, as rank 0's ``open_meeting`` returned it.
    """

    hosts: tuple[str, ...]
    first_address: str
    meeting: str


class RollCall:
    """Listens for the other ranks.

    Args:
        own: this process, which is rank 0.
        patience_s: after so many seconds, a process that has not connected is not waited for any more.

    Attributes:
        port: where it listens.

    Raises:
        ConfigError: its port is in use.
    """

    def __init__(self, own: RankEnvironment, patience_s: float) -> None:
        self._own, self._patience_s = own, patience_s
        self._began_s = time.monotonic()
        self._values = StoredValues()
        self._changed = threading.Condition()
        self._there: dict[int, _Attendance] = {}
        self._num_knocking: Counter[int] = Counter()  # connections by rank
        self._lost: dict[int, str] = {}
        self._links: dict[tuple[int, int], Connection] = {}
        self._is_joined = False
        self._listener = listen(own)
        self.port = int(self._listener.getsockname()[1])
        start_thread("zinfer-roll-call", self._accept, self._refuse_all)

    def join(self, open_meeting: Callable[[Sequence[str]], str]) -> Roll:
        """Wait until all ranks are ready, and tell them so.

        Args:
            open_meeting: is given the host names of all ranks, and returns `Roll.meeting`.

        Raises:
            RankError: one ended before, did not connect in time, or was not ready in time.
        """
        others = range(1, self._own.size)
        self._wait_ready(others)
        with self._changed:
            there = [self._there[rank] for rank in others]
            farthest = max(there, key=lambda each: each.host != self._own.host)  # those on this host may use a loopback
            hosts = (self._own.host, *(each.host for each in there))
            roll = Roll(hosts, own_address(farthest.connection), open_meeting(hosts))
            self._is_joined = True
            for rank in others:
                self._tell(rank, roll=asdict(roll))
        return roll

    def open_links(self, roll: Roll, number: int) -> list[Connection]:
        """Return connections to ranks 1, 2 and so on, which open them too.

        Args:
            roll: what `join` returned.
            number: of earlier links.

        Raises:
            RankError: a rank ended before it connected.
        """
        keys = [(rank, number) for rank in range(1, self._own.size)]
        with self._changed:

            def missing() -> list[int]:
                return [key[0] for key in keys if key not in self._links]

            def lost() -> list[str]:
                return [self._lost[rank] for rank in missing() if rank in self._lost]

            self._changed.wait_for(lambda: lost() or not missing(), START_S)
            late = [f"{self._named(rank)} did not connect to rank 0 in {START_S} s" for rank in missing()]
            if told := lost() or late:
                raise RankError("; ".join(told))
            return [self._links.pop(key) for key in keys]

    def open_store(self) -> StoredValues:
        """Return what rank 0 keeps for all ranks."""
        return self._values

    def find_address(self, roll: Roll) -> str:
        """Return the address of this host that other hosts reach."""
        return roll.first_address

    def find_lost(self, timeout_s: float) -> str | None:
        """Return which rank was lost, if one is until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, timeout_s)
            return "; ".join(self._lost.values()) or None

    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks whose processes have ended."""
        with self._changed:
            return frozenset(self._lost)

    def _wait_ready(self, others: Iterable[int]) -> None:
        """Wait until all ranks are ready, as `join` does."""
        now_s = time.monotonic()
        heard_s, ready_s = max(self._began_s + self._patience_s, now_s + _LEAST_S), now_s + START_S
        with self._changed:
            while not self._lost:
                late = [rank for rank in others if rank not in self._there or not self._there[rank].is_ready]
                absent = [rank for rank in late if rank not in self._there and not self._num_knocking[rank]]
                if not late:
                    return
                rest_s = (heard_s if absent else ready_s) - time.monotonic()
                if rest_s > 0:
                    self._changed.wait(rest_s)
                    continue
                why = f"nothing was heard of it for {self._patience_s:.0f} s" if absent else f"not ready in {START_S} s"
                for rank in absent or late:
                    self._lose(rank, f"{self._named(rank)} has not joined: {why}")
            raise RankError("; ".join(self._lost.values()))

    def _accept(self) -> None:
        for connection in accepted(self._listener):
            try:
                start_thread("zinfer-roll-call", partial(self._attend, connection), partial(self._drop, connection))
            except RuntimeError:  # no more threads may be started: who connects tries again
                connection.close()

    def _refuse_all(self, failure: BaseException) -> None:
        """Refuse whoever connects from now on, and wait for none of the ranks that are not there."""
        log.error("rank 0 takes no more connections", exc_info=failure)
        with suppress(OSError):
            self._listener.close()
        with self._changed:
            for rank in {*range(1, self._own.size)} - self._there.keys():
                why = f"rank 0 takes no more connections: {type(failure).__name__}: {failure}"
                self._lose(rank, f"{self._named(rank)} has not joined: {why}")

    def _drop(self, connection: Connection, failure: BaseException) -> None:
        """Let the other end of a connection see that nobody attends to it any more."""
        log.error("rank 0 has ended a connection to another rank", exc_info=failure)
        connection.close()

    def _attend(self, connection: Connection) -> None:
        """Take what one connection says until it ends."""
        with suppress(EOFError, OSError):
            if connection.poll(START_S) and self._admit(connection, receive(connection)):
                return
        connection.close()

    def _admit(self, connection: Connection, hello: dict[str, Any]) -> bool:
        """Take what one connection says; whether it is kept.

        Raises:
            EOFError, OSError: it has ended, or is none of the job's.
        """
        refusal = self._refusal(hello)
        if refusal is not None:
            send(connection, refused=refusal)
            return False
        rank, what = int(hello["rank"]), hello.get("what")
        if what == "rank":
            return self._attend_rank(rank, str(hello.get("host")), connection, hello)
        demand(connection, self._own.key, hello)
        if what == "store":
            self._values.serve(connection)
            return False
        with self._changed:
            self._links[rank, hello["link"]] = connection
            self._changed.notify_all()
        return True

    def _attend_rank(self, rank: int, host: str, connection: Connection, hello: dict[str, Any]) -> bool:
        """Take what a rank says until its connection ends; whether it was there."""
        there: _Attendance | None = None
        with self._changed:
            self._num_knocking[rank] += 1
        try:
            demand(connection, self._own.key, hello)
            while receive(connection):
                with self._changed:
                    if there is not None:
                        there.is_ready = True
                    elif (first := self._there.get(rank)) is not None:  # two have called before one of them was there
                        send(connection, refused=_twice(rank, first.host))
                        break
                    else:  # not before: a rank that had no answer for long has connected anew
                        there = self._there[rank] = _Attendance(host, connection)
                    self._changed.notify_all()
        except (EOFError, OSError):
            return there is not None
        finally:
            with self._changed:
                self._num_knocking[rank] -= 1
                if there is not None:
                    what = "ended" if self._is_joined else "has not joined: it ended"
                    self._lose(rank, f"{self._named(rank)} {what} or was killed, or has lost its connection")
                self._changed.notify_all()
        return there is not None

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        """Return why a connection is none of a rank of this job, if it is not; its key is still to be proved."""
        rank = hello.get("rank")
        if hello.get("job") != self._own.job:
            return "another job listens there; set MASTER_PORT to a free port"
        if not isinstance(rank, int) or not 0 < rank < self._own.size:
            return f"there is no rank {rank} of {self._own.size} besides rank 0; start the processes with torchrun"
        if hello.get("what") != "rank":
            return None
        with self._changed:
            there = self._there.get(rank)
        return None if there is None else _twice(rank, there.host)

    def _lose(self, rank: int, text: str) -> None:
        """Note that a rank is lost; the others are told if they wait for it."""
        if rank in self._lost:
            return
        self._lost[rank] = text
        for other in self._there:
            self._tell(other, lost=text)
        self._changed.notify_all()

    def _tell(self, rank: int, **message: Any) -> None:
        with suppress(OSError):  # it is gone: its thread notes that
            send(self._there[rank].connection, **message)

    def _named(self, rank: int) -> str:
        there = self._there.get(rank)
        return f"rank {rank} of {self._own.size}" + (f" on {there.host}" if there else "")


@dataclass
class _Attendance:
    """One other rank that is there."""

    host: str
    connection: Connection
    is_ready: bool = False


def _twice(rank: int, host: str) -> str:
    return f"rank {rank} is there already, on {host}; give each process its own"
