"""Connections within a sub-group of a job's ranks, from its first rank to each other one, for small messages."""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

from zinfer.errors import RankError
from zinfer.ranks.model_ranks import ModelRanks

_LOOPBACK: Final = "127.0.0.1"
_BEAT_S: Final = 1.0
_PATIENCE_S: Final = 10.0
_KEY_BYTES: Final = 32


def open_member_links(ranks: ModelRanks, members: Sequence[int]) -> list[Connection]:
    """Connect the ranks of each sub-group; called by all processes of the job.

    Args:
        members: this rank's sub-group.

    Returns:
        On the first member the connections to the others, in order; elsewhere one, to the first member.

    Raises:
        RankError: a rank failed, or cannot be reached.
    """
    first = members[0]
    try:
        return _accept(ranks, members) if ranks.group.rank == first else [_connect(ranks, first)]
    except OSError as error:
        here = ranks.name_of(ranks.group.rank)
        raise RankError(f"{here} could not connect to the ranks that share its passes: {error}") from error


def _accept(ranks: ModelRanks, members: Sequence[int]) -> list[Connection]:
    key = secrets.token_bytes(_KEY_BYTES)
    found: dict[int, Connection] = {}
    address = _own_address(ranks, members)
    with socket.create_server((address if address == _LOOPBACK else "", 0), backlog=len(members)) as listener:
        listener.settimeout(_BEAT_S)
        ranks.exchange((address, listener.getsockname()[1], key))
        while len(found) < len(members) - 1:
            ranks.check()
            with suppress(TimeoutError, EOFError):
                link = _connection(listener.accept()[0])
                hello = link.recv_bytes(2 * _KEY_BYTES) if link.poll(_PATIENCE_S) else b""
                if secrets.compare_digest(hello[:_KEY_BYTES], key):
                    found[int.from_bytes(hello[_KEY_BYTES:])] = link
    return [found[rank] for rank in members[1:]]


def _connect(ranks: ModelRanks, first: int) -> Connection:
    address, port, key = ranks.exchange(("", 0, b""))[first]
    link = _connection(socket.create_connection((address, port), _PATIENCE_S))
    link.send_bytes(key + ranks.group.rank.to_bytes(4))
    return link


def _own_address(ranks: ModelRanks, members: Sequence[int]) -> str:
    """Return where the members reach this rank: on one host by loopback, else as rank 0's host is reached from here."""
    group = ranks.group
    if len({group.hosts[rank] for rank in members}) == 1:
        return _LOOPBACK
    if group.hosts[group.rank] == group.hosts[0]:
        return group.address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # nothing is sent
        route.connect((group.address, 1))
        return str(route.getsockname()[0])


def _connection(found: socket.socket) -> Connection:
    found.setblocking(True)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages follow one another unanswered
    return Connection(found.detach())
