"""Connections within a sub-group of a job's ranks, from its first rank to each other one, for small messages."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

from zinfer.errors import RankError
from zinfer.ranks.environment import draw_key
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.sockets import LOOPBACK, connect, connection_of, demand, greet, prove, receive

_BEAT_S: Final = 1.0
_PATIENCE_S: Final = 10.0


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
    key = draw_key()
    found: dict[int, Connection] = {}
    address = _own_address(ranks, members)
    with socket.create_server((address if address == LOOPBACK else "", 0), backlog=len(members)) as listener:
        listener.settimeout(_BEAT_S)
        ranks.exchange((address, listener.getsockname()[1], key))
        while len(found) < len(members) - 1:
            ranks.check()
            with suppress(TimeoutError):
                _admit(connection_of(listener.accept()[0]), key, found)
    return [found[rank] for rank in members[1:]]


def _connect(ranks: ModelRanks, first: int) -> Connection:
    address, port, key = ranks.exchange(("", 0, ""))[first]
    link = connect(address, port)
    try:
        drawn = greet(link, rank=ranks.group.rank)
        if not link.poll(_PATIENCE_S):
            raise TimeoutError("no answer")
        prove(link, key, drawn, receive(link))
    except EOFError as error:
        raise ConnectionError("the connection ended") from error
    return link


def _admit(link: Connection, key: str, found: dict[int, Connection]) -> None:
    """Add a connection by its rank, if it is one of the ranks'."""
    with suppress(OSError, EOFError):
        if link.poll(_PATIENCE_S):
            hello = receive(link)
            demand(link, key, hello)
            found[int(hello["rank"])] = link
            return
    link.close()


def _own_address(ranks: ModelRanks, members: Sequence[int]) -> str:
    """Return where the members reach this rank: on one host by loopback, else as rank 0's host is reached from here."""
    group = ranks.group
    if len({group.hosts[rank] for rank in members}) == 1:
        return LOOPBACK
    if group.hosts[group.rank] == group.hosts[0]:
        return group.address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # nothing is sent
        route.connect((group.address, 1))
        return str(route.getsockname()[0])
