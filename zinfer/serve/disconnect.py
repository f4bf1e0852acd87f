"""Ends work for clients that are gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

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


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
