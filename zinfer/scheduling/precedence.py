"""`Precedence`: which of the sequences that wait are admitted before others."""

from typing import NamedTuple


class Precedence(NamedTuple):
    """First those not in the background, then owners in turn, then those of a lower number.

    is_background: whether it gives way to sequences that are not; see [Note: background] in `claims`.
    priority: lower ones are admitted before others of the same owner.
    owner: whose it is; see `WaitingQueue`.
    """

    is_background: bool = False
    priority: int = 0
    owner: str = ""


FIRST_COME = Precedence()
"""Of sequences about which nothing is stated: they are admitted in order."""
