"""Bodies of requests: large ones are read beside the event loop."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from fastapi import Request
from pydantic import BaseModel, field_validator

from zinfer.errors import ConfigError
from zinfer.serve.body import read_call, read_record


class _Seen(BaseModel):
    text: str

    @field_validator("text")
    @classmethod
    def _check(cls, text: str) -> str:
        return threading.current_thread().name


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize(("num_bytes", "is_beside"), [(1000, False), (1 << 20, True)])
def test_large_bodies_do_not_hold_up_the_event_loop(num_bytes: int, is_beside: bool) -> None:
    body = json.dumps({"text": "a" * num_bytes}).encode()
    seen, then_seen = asyncio.run(
        read_call(request_of(body), _Seen, lambda read: (read.text, threading.current_thread().name))
    )
    assert seen == then_seen
    assert (seen != threading.main_thread().name) is is_beside
    assert asyncio.run(read_record(request_of(body), dict)) == {"text": "a" * num_bytes}
    with pytest.raises(ConfigError, match="not JSON"):
        asyncio.run(read_record(request_of(body[:-1]), dict))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": [' + b"[]," * (1 << 19) + b"[]]}", "the body has 524,291 lists and objects; 524,288 at most"),
        (b'{"a": [' + b"1," * (1 << 22) + b"1,1]}", "the body has 4,194,305 items; 4,194,304 at most"),
        (b"{" + b",".join(b'"%d": 1' % number for number in range(1025)) + b"}", "the body has 1,025 fields; 1,024"),
        (
            b'{"a": ' + b"1" * 101 + b"}",
            "not JSON that can be used: the body has a number of more than 100 digits, which begins",
        ),
        (b'{"' + b"a" * 1000 + b'": 1, "' + b"a" * 1000 + b'": 1}', f"the field '{'a' * 97}...' is given twice"),
    ],
)
def test_bodies_have_limits(body: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        asyncio.run(read_record(request_of(body), dict))


def test_limits_are_of_what_is_outside_texts() -> None:
    text = '[{,"' * (1 << 20) + "1" * 200
    assert asyncio.run(read_record(request_of(json.dumps({"text": text}).encode()), dict)) == {"text": text}
