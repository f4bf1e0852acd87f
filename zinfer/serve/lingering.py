"""`Lingering`: reads what is left of a body whose answer does not need it, so that clients can read the answer."""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LINGER_S: Final = 30.0


class Lingering:
    """ASGI middleware: an answer that comes before the end of its request's body ends when the body does.

    Its bytes are sent at once. A connection that is closed while the client still sends is reset, and many clients
    then never see the answer. After 30 s, or when the server ends, the answer ends nevertheless.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        has_more = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def receive_noting() -> Message:
            nonlocal has_more
            message = await receive()
            has_more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_lingering(message: Message) -> None:
            if has_more and message["type"] == "http.response.start" and "expect" in headers:
                MutableHeaders(scope=message)["connection"] = "close"  # the client may leave the body out now
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not (has_more and is_last):
                await send(message)
                return
            await send({**message, "more_body": True})
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(_LINGER_S):
                    while has_more:
                        await receive_noting()
            await send({"type": "http.response.body", "body": b""})

        await self._app(scope, receive_noting, send_lingering)
