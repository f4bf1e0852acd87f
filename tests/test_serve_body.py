"""Bodies of requests: large ones are read beside the event loop."""

import asyncio
import json
import threading
from typing import Any

import pytest
from fastapi import Request
from pydantic import BaseModel, field_validator

from zinfer.errors import ConfigError
from zinfer.serve.body import read_model, read_record


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
    seen = asyncio.run(read_model(request_of(body), _Seen)).text
    assert (seen != threading.main_thread().name) is is_beside
    assert asyncio.run(read_record(request_of(body))) == {"text": "a" * num_bytes}
    with pytest.raises(ConfigError, match="not JSON"):
        asyncio.run(read_record(request_of(body[:-1])))
