"""A server's HTTP application without a model: what is answered before anything is computed."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import FastAPI, Request

from zinfer.serve.app import make_app
from zinfer.serve.disconnect import event_stream
from zinfer.serve.errors import ClientGone
from zinfer.serve.replica import Replica
from zinfer.serve.replica_process import ReplicaProcess
from zinfer.serve.service import Service, ServiceLimits

ORIGIN = "http://o.example"


def app_in(folder: Path, *, keys: Sequence[str] = (), origins: Sequence[str] = ()) -> FastAPI:
    """An application with files and batches, whose replica is never started."""
    service = Service([Replica(0, ReplicaProcess(["false"], folder / "socket"))], None, ["model"], ServiceLimits())
    return make_app(service, keys=keys, origins=origins, folder=folder / "kept")


def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def answered() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return await http.request(method, path, **options)

    return asyncio.run(answered())


def test_browsers_of_an_allowed_origin_may_use_keys(tmp_path: Path) -> None:
    """They ask before they send the key, and show a refusal to nobody unless it names their origin."""
    app = app_in(tmp_path, keys=["k1"], origins=[ORIGIN])
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    asked = ask(app, "OPTIONS", "/v1/chat/completions", headers={"Origin": ORIGIN, **wanted})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    refused = ask(app, "GET", "/v1/models", headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    given = ask(app, "GET", "/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer k1"})
    assert (given.status_code, given.headers["access-control-allow-origin"]) == (200, ORIGIN)
    other = ask(app, "OPTIONS", "/v1/chat/completions", headers={"Origin": "http://other.example", **wanted})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


def test_a_client_that_leaves_before_the_first_event_ends_the_work() -> None:
    has_ended = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal has_ended
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            has_ended = True

    async def leave() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        asyncio.run(event_stream(Request({"type": "http"}, leave), events()))
    assert has_ended


TEXT = {"file": ("a.jsonl", b"{}")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "path", "options", "words", "field"),
    [
        ("GET", "/v1/files?limit=abc", {}, "limit must be a whole number, not 'abc'", "limit"),
        ("GET", "/v1/files?limit=0", {}, "limit must be at least 1, not '0'", "limit"),
        ("GET", "/v1/files?order=up", {}, "order must be 'asc' or 'desc', not 'up'", "order"),
        ("GET", "/v1/batches?limit=101", {}, "limit must be at most 100, not '101'", "limit"),
        ("GET", "/v1/batches?before=x", {}, "unknown field 'before'", "before"),
        ("POST", "/v1/files", {"data": {"purpose": "batch"}}, "file is missing", "file"),
        ("POST", "/v1/files", {"files": TEXT}, "purpose is missing", "purpose"),
        ("POST", "/v1/files", {"data": {"purpose": "batch", "file": "a"}}, "file must be an uploaded file", "file"),
        (
            "POST",
            "/v1/files",
            {"data": {"purpose": "batch", "expires_after[seconds]": "3600"}, "files": TEXT},
            "expires_after is not supported; leave it out",
            "expires_after",
        ),
    ],
)
def test_wrong_parameters_are_named_in_openais_form(
    tmp_path: Path, method: str, path: str, options: dict[str, Any], words: str, field: str
) -> None:
    app = app_in(tmp_path)
    answer = ask(app, method, path, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert error["message"].startswith(words)
    assert ask(app, "GET", "/v1/files").json()["data"] == []
    assert "422" not in ask(app, "GET", "/openapi.json").text


def test_files_are_listed_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    ids = [
        ask(app, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (f"{number}", b"{}")}).json()["id"]
        for number in range(3)
    ]

    def listed(query: str) -> list[str]:
        return [each["id"] for each in ask(app, "GET", f"/v1/files{query}").json()["data"]]

    assert listed("") == listed("?order=desc") == ids[::-1]
    assert listed("?order=asc") == ids
    assert listed(f"?order=asc&limit=1&after={ids[0]}") == [ids[1]]


def test_no_page_loads_scripts_of_other_hosts(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    assert [ask(app, "GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [200, 404, 200]
    assert "default-src 'none'" in ask(app, "GET", "/docs").headers["content-security-policy"]
    assert "://" not in ask(app, "GET", "/docs").text


def test_no_request_forges_lines_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one without a key."""
    app = app_in(tmp_path, keys=["k1"])
    with caplog.at_level("INFO", "zinfer.serve"):
        assert ask(app, "GET", "/a%0a2026-01-01%20forged%1b[31m%e2%80%a8").status_code == 401
    (line,) = [each.getMessage() for each in caplog.records]
    assert " /a\\n2026-01-01 forged\\x1b[31m\\u2028 401 " in line


LONG = "a" * 5000


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/v1/models/{LONG}", None),
        ("GET", f"/v1/files/{LONG}", None),
        ("GET", f"/v1/files?{LONG}=1", None),
        ("GET", f"/v1/files?limit={LONG}", None),
        ("POST", "/v1/completions", {"prompt": "a", "model": LONG}),
        ("POST", "/v1/completions", {"prompt": {LONG: LONG}}),
        ("POST", "/v1/completions", {"prompt": [[LONG] * 100]}),
        ("POST", "/v1/chat/completions", {"messages": LONG}),
        ("POST", "/v1/embeddings", {"input": {LONG: 1}}),
        ("POST", f"/mii/{LONG}", {"prompts": ["a"]}),
        ("POST", "/tokenize", {"prompt": "a", "messages": LONG}),
        ("POST", "/detokenize", {"tokens": LONG}),
    ],
)
def test_what_a_client_gave_is_cut_in_messages(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None
) -> None:
    answer = ask(app_in(tmp_path), method, path, json=body)
    assert 400 <= answer.status_code < 500
    assert "a" * 110 not in answer.text
    assert len(answer.content) < 1000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", ["/", "/health", "/version", "/metrics", "/v1/models", "/v1/files", "/page/page.js"])
def test_head_is_answered_as_get(tmp_path: Path, path: str) -> None:
    app = app_in(tmp_path)
    assert [ask(app, method, path).status_code for method in ("HEAD", "GET")] == [200, 200]
    assert ask(app, "HEAD", "/v1/completions").status_code == 405


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/responses"), ("GET", "/v1/responses/resp_1/input_items")])
def test_the_responses_interface_names_the_one_to_use(tmp_path: Path, method: str, path: str) -> None:
    answer = ask(app_in(tmp_path), method, path)
    assert answer.status_code == 501
    assert "use /v1/chat/completions" in answer.json()["error"]["message"]
