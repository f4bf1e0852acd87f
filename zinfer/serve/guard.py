"""What each request passes before its route: an id, the API key, a time limit for its body."""

import hmac
import logging
import re
import time
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zinfer.serve.errors import ApiError

_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_MOST_DIGITS: Final = 18  # int() refuses thousands
log = logging.getLogger("zinfer.serve")


class Guard:
    """ASGI middleware: names requests, refuses those without a key, and logs each without its text.

    Args:
        keys: one of them must be given as ``Authorization: Bearer KEY``; none: all requests pass.
        most_body_bytes: a body that states to be larger is refused before it is read.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], most_body_bytes: int) -> None:
        self._app = app
        self._most_body_bytes = most_body_bytes
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began_s, status = Headers(scope=scope), time.monotonic(), 0
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else uuid4().hex

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self._answer(headers)(scope, receive, send_named)
        finally:
            log.info("%s %s %s %d %.3f s", name, scope["method"], scope["path"], status, time.monotonic() - began_s)

    def _answer(self, headers: Headers) -> ASGIApp:
        """Return the application, or the answer to a request that does not reach it."""
        if self._keys and not self._is_allowed(headers):
            error = ApiError(401, "the API key is missing or wrong; give it as 'Authorization: Bearer KEY'")
            return JSONResponse(error.body, error.status, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:_MOST_DIGITS]) > self._most_body_bytes:
            error = ApiError(413, f"the body's {length} bytes are more than {self._most_body_bytes}; send less")
            return JSONResponse(error.body, error.status, headers={"Connection": "close"})
        return self._app

    def _is_allowed(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        found = [hmac.compare_digest(given, each) for each in self._keys]  # all of them: the time tells nothing
        return kind.lower() == "bearer" and any(found)
