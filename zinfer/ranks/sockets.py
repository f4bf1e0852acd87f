"""Connections between hosts. Both ends see the end of a process at once, and of a host within `SILENCE_S`.

[Note: who is at the other end]
Whoever reaches a port may connect to it, so both ends prove that they know the secret of the job before either takes
anything from the other: each sends a number drawn for this connection, and the HMAC of both numbers by the secret. The
secret itself is never sent. What follows is neither signed nor encrypted, so the network between hosts is trusted not
to change what passes.
"""

import errno
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.ranks.environment import KEY, RankEnvironment

SILENCE_S: Final = 45
"""After so many seconds without an answer a rank counts as lost; a process that computes goes on answering."""
_MOST_MESSAGE_BYTES: Final = 1 << 20
LOOPBACK: Final = "127.0.0.1"
_LOOPBACKS: Final = ("localhost", LOOPBACK, "::1")
_TRY_S: Final = 5.0
_DRAWN_BYTES: Final = 16
_STRANGER_S: Final = 300.0  # a rank that imports may take long to read an answer
_FULL: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S: Final = 0.1


def listen(own: RankEnvironment) -> socket.socket:
    """Return a socket of rank 0 that listens on the first of its ports that is free.

    Raises:
        ConfigError: none is free, or its address is unknown.
    """
    try:
        socket.getaddrinfo(own.address, None)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR is {own.address}: {error.strerror}; set it to the host of rank 0") from error
    host = own.address if own.address in _LOOPBACKS else ""
    several = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if several or ":" in host else socket.AF_INET
    errors = []
    for port in own.ports:
        try:
            return socket.create_server((host, port), family=family, backlog=own.size, dualstack_ipv6=several)
        except OSError as error:
            errors.append(f"port {port}: {os.strerror(error.errno or 0)}")
    raise ConfigError(
        f"rank 0 on {own.host} cannot listen for the others ({'; '.join(errors)}); set MASTER_PORT to a free port"
    )


def reserve_port(host: str = "") -> socket.socket:
    """Return a socket with a port that no other program is given; `listen` takes the port while the socket is open."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # which lets another listen that has it too
    found.bind((host, 0))
    return found


def accepted(listener: socket.socket) -> Iterator[Connection]:
    """Yield connections as they come, until the listener is closed.

    Where no more files may be open, those that wait stay in the queue until some are closed.
    """
    while True:
        try:
            found, _ = listener.accept()
        except ConnectionError:  # it has left already
            continue
        except OSError as error:
            if error.errno not in _FULL:
                raise
            time.sleep(_PAUSE_S)
            continue
        try:
            connection = connection_of(found)
        except OSError:  # it has left already
            found.close()
            continue
        yield connection


def connect(address: str, port: int) -> Connection:
    """Return a connection to a port.

    Raises:
        OSError: nothing listens there, or nothing can be reached.
    """
    return connection_of(socket.create_connection((address, port), _TRY_S))


def connection_of(found: socket.socket) -> Connection:
    """Return a connection over a socket, which it takes over."""
    found.setblocking(True)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 35_000),  # in milliseconds
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        found.setsockopt(level, option, value)
    return Connection(found.detach())


def own_address(connection: Connection) -> str:
    """Return the address of this host that a connection uses."""
    with socket.socket(fileno=os.dup(connection.fileno())) as found:
        return str(found.getsockname()[0]).removeprefix("::ffff:")  # of an IPv4 address seen by IPv6


def send(connection: Connection, **message: Any) -> None:
    """Send a small message of strings and numbers, not yet of what pickle takes: the other end is unknown."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Return the other end's next message.

    Raises:
        EOFError, OSError: the connection has ended, or carries something else.
    """
    try:
        found = json.loads(connection.recv_bytes(_MOST_MESSAGE_BYTES))
    except (ValueError, RecursionError) as error:
        raise OSError("the other end is no rank of zinfer") from error
    if not isinstance(found, dict):
        raise OSError("the other end is no rank of zinfer")
    return found


def greet(connection: Connection, **hello: Any) -> str:
    """Say who connects, and return the number drawn for this connection, which `prove` takes."""
    drawn = secrets.token_hex(_DRAWN_BYTES)
    send(connection, drawn=drawn, **hello)
    return drawn


def prove(connection: Connection, key: str, drawn: str, answer: Mapping[str, Any]) -> None:
    """Prove that this end knows the key, once the other end has proved it by its answer to `greet`.

    Raises:
        ConnectionRefusedError: the other end has refused, or has another key.
        OSError: the connection has ended.
    """
    if "refused" in answer:
        raise ConnectionRefusedError(str(answer["refused"]))
    theirs = str(answer.get("drawn"))
    if not hmac.compare_digest(str(answer.get("proof")).encode(), _proof(key, "first", drawn, theirs)):
        raise ConnectionRefusedError(f"what listens there has another key; set {KEY} to one secret for all ranks")
    send(connection, proof=_proof(key, "other", drawn, theirs).decode())


def demand(connection: Connection, key: str, hello: Mapping[str, Any]) -> None:
    """Prove that this end knows the key, and let the other one prove it.

    Args:
        hello: what `greet` sent.

    Raises:
        EOFError, OSError: the connection has ended, or the other end has another key.
    """
    theirs, drawn = str(hello.get("drawn")), secrets.token_hex(_DRAWN_BYTES)
    send(connection, drawn=drawn, proof=_proof(key, "first", theirs, drawn).decode())
    if not connection.poll(_STRANGER_S):
        raise TimeoutError("no proof came")
    proof = str(receive(connection).get("proof"))
    if not hmac.compare_digest(proof.encode(), _proof(key, "other", theirs, drawn)):
        raise ConnectionRefusedError("the other end has another key")


def _proof(key: str, side: str, theirs: str, drawn: str) -> bytes:
    """Return the proof of one side; of different words for each, so that none can be sent back as the other's."""
    return hmac.digest(key.encode(), f"zinfer {side} {theirs} {drawn}".encode(), "sha256").hex().encode()


def end_link(connection: Connection) -> None:
    """Let both ends see the end of a connection, also a thread that waits for it. May be called again."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as found:
        found.shutdown(socket.SHUT_RDWR)
