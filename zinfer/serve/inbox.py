"""`Inbox`: what a request has got and nobody has read yet."""

import asyncio

from zinfer.requests.completion import CompletionDelta


class Inbox:
    """Holds deltas for one reader; those of one completion are joined while they wait.

    So a server that is slower than its replicas for a while sends fewer, longer events, and catches up.
    """

    def __init__(self) -> None:
        self._deltas: dict[int, CompletionDelta] = {}
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, event: CompletionDelta | Exception) -> None:
        """Add a delta, or the error that ends the request."""
        if isinstance(event, Exception):
            self._failure = event
        else:
            before = self._deltas.get(event.sample_index)
            self._deltas[event.sample_index] = event if before is None else before.joined(event)
        self._arrived.set()

    async def take(self) -> list[CompletionDelta]:
        """Return what has come, at least one delta. Raises the error after the last one."""
        await self._arrived.wait()
        found, self._deltas = list(self._deltas.values()), {}
        if not found:
            assert self._failure is not None
            raise self._failure
        if self._failure is None:
            self._arrived.clear()
        return found
