"""What each request passes before its route: an id, the API key, a limit for its body."""

import hmac
import logging
import re
import time
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zinfer.requests.field_errors import printable
from zinfer.serve.caller import CALLER, name_of
from zinfer.serve.errors import ApiError
from zinfer.serve.page_routes import is_page

_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_FILES: Final = "/v1/files"
_MOST_DIGITS: Final = 18  # int() refuses thousands
log = logging.getLogger("zinfer.serve")


class Guard:
    """ASGI middleware: names requests, refuses those without a key, and logs each without its text.

    Args:
        keys: one of them must be given as ``Authorization: Bearer KEY``, but for the page; none: all requests pass.
        most_body_bytes: larger bodies are refused, before they are read if they state their size.
        most_file_bytes: likewise where files are uploaded.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], most_body_bytes: int, most_file_bytes: int) -> None:
        self._apps = {
            most: RequestBodyLimitMiddleware(app, max_body_size=most) for most in (most_body_bytes, most_file_bytes)
        }
        self._most_body_bytes, self._most_file_bytes = most_body_bytes, most_file_bytes
        self._keys = [key.encode() for key in keys]
        self._names = [name_of(key) for key in self._keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._apps[self._most_body_bytes](scope, receive, send)
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

        caller = self._caller(headers)
        token = CALLER.set(caller or "")
        try:
            await self._answer(headers, scope, caller)(scope, receive, send_named)
        finally:
            CALLER.reset(token)
            took_s, path = time.monotonic() - began_s, printable(scope["path"])  # which is decoded
            log.info("%s %s %s %d %.3f s", name, scope["method"], path, status, took_s)

    def _answer(self, headers: Headers, scope: Scope, caller: str | None) -> ASGIApp:
        """Return the application, or the answer to a request that does not reach it."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._keys and not is_page(scope["method"], path) and caller is None:
            error = ApiError(401, "the API key is missing or wrong; give it as 'Authorization: Bearer KEY'")
            return JSONResponse(error.body, error.status, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        most = self._most_file_bytes if path.endswith(_FILES) else self._most_body_bytes
        if length.isdecimal() and int(length[:_MOST_DIGITS]) > most:
            error = ApiError(413, f"the body's {length:.30} bytes are more than {most}; send less")
            return JSONResponse(error.body, error.status)
        return self._apps[most]

    def _caller(self, headers: Headers) -> str | None:
        """Return the name of the key that a request gives; None if it gives none of them."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        found = [hmac.compare_digest(given, each) for each in self._keys]  # all of them: the time tells nothing
        return self._names[found.index(True)] if kind.lower() == "bearer" and any(found) else None
