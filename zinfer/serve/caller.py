"""Who makes the request that a task answers: known to all routes without being handed to each."""

from contextvars import ContextVar
from hashlib import blake2b
from typing import Final

CALLER: Final = ContextVar("zinfer_caller", default="")
"""The name of the API key; empty if the server has none. Callers take turns (`zinfer.scheduling.waiting_queue`)."""


def name_of(key: bytes) -> str:
    """Return the name of a key's caller, which does not tell the key; it is the same after a restart."""
    return blake2b(key, digest_size=16, person=b"zinfer-caller").hexdigest()


def may_see(owner: str) -> bool:
    """Whether the caller may see what an owner has stored. Without keys, or stored without, it is everybody's."""
    return CALLER.get() in ("", owner) or not owner
