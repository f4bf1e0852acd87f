"""Small values by key, which rank 0 keeps for all ranks, and the connections of the ranks to them.

Torch's stores serve whoever reaches their port, so the ranks' own values pass over connections that have proved who is
at the other end (`zinfer.ranks.sockets`). Values are bytes: nothing that is received is run.
"""

import math
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec

from zinfer.errors import RankError
from zinfer.ranks.sockets import SILENCE_S

_LEAST_PAUSE_S: Final = 20e-6
_LENGTH: Final = struct.Struct("!i")  # as `Connection` writes it, of less than 2 GiB
_READ_BYTES: Final = 1 << 16
_LOOK_S: Final = 1.0  # for what another connection has found


def growing_pauses(most_s: float) -> Iterator[float]:
    """Yield the seconds to sleep between questions: little at first, then twice as much each time."""
    pause_s = _LEAST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)


class StoredValues:
    """What rank 0 keeps; thread-safe. Each method that `RankStore` has is explained there."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Lock()
        self._awaited: defaultdict[str, list[threading.Event]] = defaultdict(list)

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._set(key, value)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def has(self, *keys: str) -> bool:
        return all(key in self._values for key in keys)

    def set_once(self, key: str, value: bytes) -> bytes:
        with self._changed:
            if key not in self._values:
                self._set(key, value)
            return self._values[key]

    def add(self, key: str, number: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + number
            if number:
                self._set(key, str(total).encode())
            return total

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def arrives(self, key: str, timeout_s: float) -> bool:
        with self._changed:
            if key in self._values:
                return True
            came = threading.Event()
            self._awaited[key].append(came)
        if came.wait(timeout_s):
            return True
        with self._changed:
            if waiting := self._awaited.get(key):
                waiting.remove(came)
                if not waiting:
                    del self._awaited[key]
        return came.is_set()

    def serve(self, connection: Connection) -> None:
        """Answer the questions of one rank until its connection ends, or asks what no rank does."""
        with suppress(OSError), connection:
            for question in _messages(connection):
                name, *args = msgspec.msgpack.decode(question)
                connection.send_bytes(msgspec.msgpack.encode(_CALLS[name](self, *args)))

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for each in self._awaited.pop(key, ()):
            each.set()


def _messages(connection: Connection) -> Iterator[bytes]:
    """Yield what the other end sends by `Connection.send_bytes`, until the connection ends.

    A small message takes one call to the system: after each, this thread waits for those that hold Python's lock.
    """
    held = b""
    while True:
        while len(held) < _LENGTH.size or len(held) < (end := _LENGTH.size + _LENGTH.unpack_from(held)[0]):
            if not (more := os.read(connection.fileno(), _READ_BYTES)):
                return
            held += more
        yield held[_LENGTH.size : end]
        held = held[end:]


_CALLS: Final[dict[Any, Callable[..., Any]]] = {
    call.__name__: call
    for call in (
        StoredValues.set,
        StoredValues.get,
        StoredValues.has,
        StoredValues.set_once,
        StoredValues.add,
        StoredValues.delete,
        StoredValues.arrives,
    )
}


class RankStore:
    """One thread's connection. Every method raises RankError once rank 0, and with it the store, is gone or silent.

    Args:
        connect: returns a connection to rank 0; on rank 0 what it keeps.
        prefix: of the model's keys.
        gone: makes the error from the reason; None: no answer came.
        lost: returns the error that another connection has met, if any.
    """

    def __init__(
        self,
        connect: Callable[[], Connection | StoredValues],
        prefix: str,
        gone: Callable[[str | None], RankError],
        lost: Callable[[], RankError | None],
    ) -> None:
        self._connect, self._prefix, self._gone, self._lost = connect, prefix, gone, lost
        self._link: Connection | StoredValues | None = None
        self.has()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._ask("set", self._named(key), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return bytes(self._ask("get", self._named(key)))

    def has(self, *keys: str) -> bool:
        """Whether all keys are set."""
        return bool(self._ask("has", *map(self._named, keys)))

    def set_once(self, key: str, value: str) -> str:
        """Set a key unless it is set; returns its value."""
        return bytes(self._ask("set_once", self._named(key), value.encode())).decode()

    def add(self, key: str, number: int) -> int:
        """Add to a counter; returns its new value."""
        return int(self._ask("add", self._named(key), number))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._ask("delete", self._named(key))

    def arrives(self, key: str, timeout_s: float) -> bool:
        """Whether a key is set within the timeout."""
        return bool(self._ask("arrives", self._named(key), timeout_s, timeout_s=timeout_s + SILENCE_S))

    def close(self) -> None:
        """End the connection."""
        if isinstance(self._link, Connection):
            self._link.close()
        self._link = None

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, call: str, *args: Any, timeout_s: float = SILENCE_S) -> Any:
        try:
            if (failure := self._lost()) is not None:
                raise failure
            link = self._link = self._link or self._connect()
            if isinstance(link, StoredValues):
                return _CALLS[call](link, *args)
            link.send_bytes(msgspec.msgpack.encode((call, *args)))
            for _ in range(math.ceil(timeout_s / _LOOK_S)):  # seconds while this process runs, not while it is stopped
                if link.poll(_LOOK_S):
                    return msgspec.msgpack.decode(link.recv_bytes())
                if (failure := self._lost()) is not None:
                    raise failure
        except (EOFError, OSError) as error:
            raise self._gone(_reason(error)) from error
        except RankError:
            raise
        except BaseException:  # a signal: an answer may still come, and is not that to the next question
            self.close()
            raise
        raise self._gone(None)


def _reason(error: Exception) -> str | None:
    """Return why a connection is of no use; None: the other end is there, and does not answer."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return None
    return str(error).splitlines()[0] if str(error) else "its connection ended"
