"""Who makes the request that a task answers: known to all routes without being handed to each."""

from contextvars import ContextVar
from typing import Final

CALLER: Final = ContextVar("zinfer_caller", default="")
"""The number of the API key; empty if the server has none. Callers take turns (`zinfer.scheduling.waiting_queue`)."""
