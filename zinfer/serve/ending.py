"""`Ending`: tells clients whose requests are cut short that the server is ending."""

import asyncio
from contextlib import suppress
from typing import Final

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zinfer.serve.answers import event
from zinfer.serve.errors import ApiError

_REASON: Final = "the server is ending, and this request took longer than it waits for; send it again"


class Ending:
    """ASGI middleware: a request that is cancelled gets 503, or an error as the last event of its stream.

    The HTTP server cancels what is left when it has waited for long enough. An answer that has begun and is no stream
    of events stays incomplete.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = has_ended = is_stream = False

        async def send_noting(message: Message) -> None:
            nonlocal has_begun, has_ended, is_stream
            if message["type"] == "http.response.start":
                has_begun = True
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            else:
                has_ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            if scope["type"] != "http" or has_ended:
                raise
            error = ApiError(503, _REASON, retry_after_s=1)
            with suppress(asyncio.CancelledError):  # again, while the client does not read
                if not has_begun:
                    await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, send)
                elif is_stream:
                    await send({"type": "http.response.body", "body": event(error.body)})
