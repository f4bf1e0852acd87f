"""Tasks beside others, none of which ends by an error that nobody sees."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

_AGAIN_S: Final = 1.0
log = logging.getLogger("zinfer.serve")


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncGenerator[list[asyncio.Task[None]], None]:
    """Run works as tasks until the block ends. If one of them fails, the block is cancelled, and raises its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in works]
            try:
                yield tasks
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def lasting(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do work until it returns; if it fails, log the error and begin again."""
    while True:
        try:
            await work()
            return
        except Exception:
            log.exception("zinfer: %s failed, and begins again", what)
        await asyncio.sleep(_AGAIN_S)
