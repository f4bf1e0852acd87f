"""Ends work for clients that are gone."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from zinfer.serve.errors import ClientGone

_T = TypeVar("_T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of work; cancel it if the client closes its connection before.

    Raises:
        ClientGone: it did.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return await working
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def event_stream(request: Request, events: AsyncGenerator[bytes, None], **headers: str) -> StreamingResponse:
    """Return the response that streams these events, once the first is there.

    What the first one raises is raised here, so it can still be told by the response's status.

    Raises:
        ClientGone: the client closed its connection before.
    """

    async def begun() -> bytes:
        return await anext(events)

    first = await unless_disconnected(request, begun())

    async def stream() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            yield first
            async for event in events:
                yield event

    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
