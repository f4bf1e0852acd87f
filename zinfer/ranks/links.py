"""Connections between the first of some ranks and each other one, for small messages.

A process that dies ends its own at once.
"""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

from zinfer.errors import RankError
from zinfer.ranks.group import RankGroup


def open_links(
    group: RankGroup, members: Sequence[int] | None = None, exchange: Callable[[Any], Sequence[Any]] | None = None
) -> list[Connection]:
    """Connect some ranks; called by all processes.

    Args:
        members: the ranks to connect, this one among them; None: all.
        exchange: returns what every process gives, by rank; by default over torch's group.

    Returns:
        On the first member the connections to the others, in order; elsewhere one, to the first member.

    Raises:
        RankError: a rank did not connect.
    """
    try:
        members = range(group.size) if members is None else members
        exchange = exchange or _exchange
        return (
            _accept(group, members, exchange) if group.rank == members[0] else [_connect(group, members[0], exchange)]
        )
    except (RuntimeError, OSError, EOFError, AuthenticationError) as error:
        here = f"rank {group.rank} on {group.hosts[group.rank]}"
        raise RankError(f"{here} could not connect to the other ranks: {type(error).__name__}: {error}") from error


def end_link(link: Connection) -> None:
    """Let both ends see the end of a connection, also a thread that waits for it. May be called again."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _accept(group: RankGroup, members: Sequence[int], exchange: Callable[[Any], Sequence[Any]]) -> list[Connection]:
    key = secrets.token_bytes(32)
    found: dict[int, Connection] = {}
    with Listener((_own_address(group), 0), backlog=len(members), authkey=key) as listener:
        exchange((listener.address, key))
        while len(found) < len(members) - 1:
            connection: Any = listener.accept()
            found[connection.recv()] = connection
    return [found[rank] for rank in members[1:]]


def _connect(group: RankGroup, first: int, exchange: Callable[[Any], Sequence[Any]]) -> Connection:
    (host, port), key = exchange(None)[first]
    connection: Any = Client((socket.gethostbyname(group.address) if first == 0 else host, port), authkey=key)
    connection.send(group.rank)
    return connection  # type: ignore[no-any-return]


def _own_address(group: RankGroup) -> str:
    """Return the address at which the other ranks reach this one: that of the interface to rank 0's host."""
    if group.rank == 0:
        return group.address
    with socket.create_connection((group.address, group.port)) as connection:
        return str(connection.getsockname()[0])


def _exchange(value: Any) -> Sequence[Any]:
    """Return what every process gives, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
