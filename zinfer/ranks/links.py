"""Connections between rank 0 and each other rank, for small messages. A process that dies ends its own at once."""

import itertools
from multiprocessing.connection import Connection

from zinfer.ranks.group import RankGroup

_numbers = itertools.count()


def open_links(group: RankGroup) -> list[Connection]:
    """Connect the ranks; called by all of them, in the same order.

    Returns:
        On rank 0 the connections to ranks 1, 2 and so on; elsewhere one, to rank 0.

    Raises:
        RankError: a rank did not connect.
    """
    return group.roll_call.open_links(group.roll, next(_numbers))
