"""Connections between rank 0 and each other rank, for small messages. A process that dies ends its own at once."""

import os
import secrets
import socket
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist

from zinfer.errors import RankError
from zinfer.ranks.group import RankGroup


def open_links(group: RankGroup) -> list[Connection]:
    """Connect the ranks; called by all of them.

    Returns:
        On rank 0 the connections to ranks 1, 2 and so on; elsewhere one, to rank 0.

    Raises:
        RankError: a rank did not connect.
    """
    try:
        return _accept(group) if group.rank == 0 else [_connect(group)]
    except (RuntimeError, OSError, EOFError, AuthenticationError) as error:
        here = f"rank {group.rank} on {group.hosts[group.rank]}"
        raise RankError(f"{here} could not connect to the other ranks: {type(error).__name__}: {error}") from error


def end_link(link: Connection) -> None:
    """Let both ends see the end of a connection, also a thread that waits for it. May be called again."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _accept(group: RankGroup) -> list[Connection]:
    key = secrets.token_bytes(32)
    found: dict[int, Connection] = {}
    with Listener((group.address, 0), backlog=group.size, authkey=key) as listener:
        _broadcast((listener.address, key))
        while len(found) < group.size - 1:
            connection: Any = listener.accept()
            found[connection.recv()] = connection
    return [found[rank] for rank in range(1, group.size)]


def _connect(group: RankGroup) -> Connection:
    (_, port), key = _broadcast(None)
    connection: Any = Client((socket.gethostbyname(group.address), port), authkey=key)
    connection.send(group.rank)
    return connection  # type: ignore[no-any-return]


def _broadcast(value: Any) -> Any:
    """Return what rank 0 gives."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]
