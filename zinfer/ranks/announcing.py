"""The first sign of life of a process among others; imports nothing that takes long."""

from typing import Final

from zinfer.ranks.environment import read_environment
from zinfer.ranks.roll_call import RollCall
from zinfer.ranks.roll_member import RollMember

_TRY_S: Final = 5.0
"""In which a rank reaches a rank 0 that starts with it, before imports that hold the interpreter's lock."""
_begun: list[RollCall | RollMember] = []


def announce(patience_s: float) -> RollCall | RollMember:
    """Let the other ranks know that this process is there. Only the first call in a process does something.

    Args:
        patience_s: how long to wait for a rank that gives no sign. Little where all of them call this first of all.

    Raises:
        ConfigError: the variables are incomplete, or rank 0's port is in use.
    """
    if not _begun:
        own = read_environment()
        if own.rank == 0:
            _begun.append(RollCall(own, patience_s))
        else:
            member = RollMember(own, patience_s)
            member.wait_found(_TRY_S)
            _begun.append(member)
    return _begun[0]
