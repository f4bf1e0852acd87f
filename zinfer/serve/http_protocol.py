"""`BoundedProtocol`: HTTP connections whose requests must arrive in time, and whose answers must be read in time.

uvicorn has a time limit for the pause after an answer, and none for a request that arrives byte by byte, or for an
answer that nobody reads, which would keep its sequences running and its memory taken.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from zinfer.serve.errors import ApiError

LEAST_RATE: Final = 4096
"""Bytes a second; what arrives or is read faster is not too slow, whatever its size."""

_MOST_HEAD_BYTES: Final = 64 << 10
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed, with 408, if its first request, or one that has begun, does not arrive in time.

    A request may take `arrive_s` seconds, and one more for each `LEAST_RATE` bytes that came; so may the rest of a body
    whose answer was sent before, without the latter. Heads, and trailers, beyond 64 KiB get 431. A client that stops to
    read its answer has the same time for what waits to be sent; then the connection ends, and the request with it.

    Attributes:
        arrive_s: seconds; looked at as often, so that a connection may stay for twice as long.
        origins: whose scripts in browsers may read what the connection itself answers.
    """

    arrive_s: float
    origins: Collection[str]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_quiet_bytes = 0  # that were neither a request's end nor of a body
        self._computed: RequestResponseCycle | None = None  # `cycle` is the last that came, perhaps behind others
        self._num_unread = 0  # bytes that waited to be sent when the client was first found not to read; 0: it reads
        self._unread_since_s = 0.0
        self._await_request()
        self._look_later(self.arrive_s)

    def resume_writing(self) -> None:
        self._num_unread = 0
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        if self._computed is not None and not self._computed.response_complete:
            self._computed.disconnected = True
            self._computed.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or not self.cycle.response_complete:
            self._num_bytes += len(data)
        self._num_quiet_bytes += len(data)
        super().data_received(data)
        if self._num_quiet_bytes > _MOST_HEAD_BYTES:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # after another refusal
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._await_request()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:
            self._computed = self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_quiet_bytes = 0
        self._is_arriving = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._computed = self.pipeline[-1][0]
        super().on_response_complete()
        if not self.pipeline and self._is_arriving:  # the rest of a body; uvicorn limits the pause before a request
            self._await_request()

    def _await_request(self) -> None:
        self._is_arriving, self._since_s, self._num_bytes = True, self.loop.time(), 0

    def _count_head(self, num_bytes: int) -> None:
        """Refuse a head that is too long also if it arrives at once. Raises ValueError, which ends the parser."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _MOST_HEAD_BYTES:
            self._refuse_head()
            raise ValueError("the head is too long")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the headers are more than {_MOST_HEAD_BYTES} bytes; send less")

    def _look(self) -> None:
        now_s = self.loop.time()
        if self._is_unread_too_long(now_s):
            self._reset()
            return
        if self.flow.read_paused or self._num_unread:  # this side does not read, or the client has an answer to read
            self._since_s = now_s
        left_s = self._since_s + self.arrive_s + self._num_bytes / LEAST_RATE - now_s
        is_late = self._is_arriving and left_s <= 0
        if is_late:
            self._refuse(408, f"the request did not arrive within {self.arrive_s:.0f} s; send it faster")
        waits = self._is_arriving and not is_late
        self._look_later(max(left_s, self.arrive_s / 10) if waits else self.arrive_s)

    def _is_unread_too_long(self, now_s: float) -> bool:
        """Whether the client has not read for too long. While it does not, nothing is added to what waits for it."""
        num_waiting = self.transport.get_write_buffer_size()
        if not (self.flow.write_paused or self.transport.is_closing()) or not num_waiting:
            self._num_unread = 0
            return False
        if not self._num_unread:
            self._num_unread, self._unread_since_s = num_waiting, now_s
        num_read = self._num_unread - num_waiting
        return now_s > self._unread_since_s + self.arrive_s + num_read / LEAST_RATE

    def _reset(self) -> None:
        """End the connection, and leave nothing to the system to send: the client would not read that either."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _look_later(self, seconds: float) -> None:
        self._looking = self.loop.call_later(seconds, self._look)

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection; with an answer, unless another one is on its way."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(ApiError(status, message).body).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += self._allowed_origin()
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _allowed_origin(self) -> str:
        """Return the header by which a browser's script may read the answer; none for origins that may not call."""
        origin = dict(self.headers or ()).get(b"origin", b"").decode("latin-1")
        if not origin or not {origin, "*"} & {*self.origins}:
            return ""
        return f"access-control-allow-origin: {origin}\r\nvary: origin\r\n"


def bounded_protocol(arrive_s: float, origins: Collection[str] = ()) -> Any:
    """Return the class of connections with this limit, for uvicorn's ``http``."""
    return type("BoundedProtocol", (BoundedProtocol,), {"arrive_s": arrive_s, "origins": origins})
