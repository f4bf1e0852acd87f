"""A server under requests that nobody should send: it stays up, and others get their own tokens all the while."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import prometheus_client
import psutil
import pytest
from churning_clients import ChurningClients, Held
from hostile_requests import ROUTES, Hostile, head, huge, many
from jobs_support import letters_model
from serve_support import KEY, Server, serving

from zinfer import LLM
from zinfer.serve.admission import Admission
from zinfer.serve.errors import ApiError

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPTS = [f"{'ab' * (number % 7 + 1)}{chr(97 + number % 26)}" for number in range(12)]
ARRIVE_S = 4.0
HEALTH_S = 1.0
"""Of the server's own time for /health."""
LONGEST_S = 5.0
"""For /health on a busy machine; else it is a fraction of a second."""
PAGE = "https://page.example"
_CLOSED = 7  # of the states in the kernel's tcp_states.h


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, str]:
    with LLM(str(model), device="cpu") as llm:
        return {each: llm.generate(each, max_new_tokens=12)[0].text for each in PROMPTS}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ("--max-body", "1", "--arrive", str(ARRIVE_S), "--max-requests", "512")
    options = ("--files", "kept", "--api-key", "b", "--allowed-origin", PAGE, *limits)
    folder, how = tmp_path_factory.mktemp("server"), {"warms_others": False}  # the replica is a child to be measured
    with ThreadPoolExecutor(1) as threads, serving(model, folder, *options, **how) as server:
        said = threads.submit(server.process.stderr.read)
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    assert "Traceback" not in said.result()


class GoodClient:
    """Asks without end while others do harm, and compares each answer with the one that it gets alone."""

    def __init__(self, server: Server, alone: dict[str, str]) -> None:
        self._client, self._alone = server.client(timeout=60), alone
        self._stop, self.num_answers = threading.Event(), 0

    def run(self) -> None:
        while not self._stop.is_set():
            prompt = PROMPTS[self.num_answers % len(PROMPTS)]
            answer = self._client.completions.create(model="letters", prompt=prompt, temperature=0, max_tokens=12)
            assert answer.choices[0].text == self._alone[prompt]
            self.num_answers += 1

    def stop(self) -> None:
        self._stop.set()

    def ping(self, server: Server) -> tuple[float, float]:
        """Ask /health ten times a second until the end.

        Returns the longest time that it took, and the most seconds of a processor that the server used meanwhile,
        which says better how long its event loop stood still: it does not grow while other processes have the machine.
        """
        longest_s = most_s = 0.0
        process = psutil.Process(server.process.pid)
        with server.http() as http:
            while not self._stop.wait(0.1):
                began_s, before = time.monotonic(), process.cpu_times()
                assert http.get("/health").status_code == 200
                took_s, after = time.monotonic() - began_s, process.cpu_times()
                longest_s = max(longest_s, took_s)
                most_s = max(most_s, min(took_s, after.user + after.system - before.user - before.system))
        return longest_s, most_s


@pytest.mark.parametrize("number", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_hostile_requests_harm_nobody(server: Server, alone: dict[str, str], number: int) -> None:
    number = int(os.environ.get("ZINFER_HOSTILE", number))
    good = GoodClient(server, alone)

    def send(request: Hostile) -> int | None:
        status = request.send(server.url, timeout=60)
        assert status is None or status < 500, (status, request.data[:2000])
        return status

    with ThreadPoolExecutor(10) as threads:
        beside, pinging = threads.submit(good.run), threads.submit(good.ping, server)
        try:
            found = Counter(threads.map(send, many(number, number, KEY)))
        finally:
            good.stop()
        beside.result()
    longest_s, most_s = pinging.result()
    print(dict(found), good.num_answers, f"/health within {longest_s:.2f} s, {most_s:.2f} s of them the server's")
    assert longest_s < LONGEST_S
    assert most_s < HEALTH_S
    assert good.num_answers > 0
    assert found[400] > number / 4
    assert found[200] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_clients_that_vanish_leave_nothing_behind(server: Server, alone: dict[str, str], seconds: int) -> None:
    clients = ChurningClients(server.url, KEY, alone, num_new=12)
    processes = [server.process.pid, *server.replica_ids()]
    clients.run(1 + seconds / 10)  # what is allocated once
    _idle(server)
    before = [Held.by(each) for each in processes]
    assert min(each.rss_bytes for each in before) > 100 << 20, "one of them does not compute, and stands in for another"
    found = clients.run(float(os.environ.get("ZINFER_CHURN_S", seconds)), seed=1)
    assert _idle(server)["num_used_pages"] == 0
    assert min(found[each] for each in ("whole", "stream", "left")) > 0
    deadline = time.monotonic() + 30
    while True:  # the last connections may be closing
        after = [Held.by(each) for each in processes]
        if all(new.num_files <= old.num_files for old, new in zip(before, after, strict=True)):
            break
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.1)
    print(dict(found), before, after)
    for old, new in zip(before, after, strict=True):
        assert new.num_threads == old.num_threads
        assert new.rss_bytes < old.rss_bytes + (64 << 20)


def _idle(server: Server) -> dict[str, Any]:
    """Wait until nothing is under way and all connections are gone; returns the engine's counters of then."""
    deadline = time.monotonic() + 60
    while True:
        found: Any = server.load()
        (replica,) = found["replicas"]
        idle = found["sequences_under_way"] == replica["outstanding_tokens"] == replica["running_sequences"] == 0
        if idle and replica["engine"]["num_used_pages"] == 0:
            time.sleep(1.1)  # replicas report once a second
            return dict(server.load()["replicas"][0]["engine"])  # type: ignore[index]
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def slowly(server: Server, first: bytes) -> bytes:
    """Send bytes one by one until the server ends the connection; returns what it answered."""
    where, began_s = urlsplit(server.url), time.monotonic()
    answer, more = b"", b"\n" if first == SLOW["lines"] else b"a"
    with socket.create_connection((where.hostname, where.port), timeout=0.2) as client:
        client.sendall(first)
        while time.monotonic() - began_s < 60:
            try:
                if not (part := client.recv(1000)):
                    return answer
                answer += part
            except TimeoutError:
                client.sendall(more if first else b"")
            except ConnectionError:
                return answer
    raise AssertionError("the connection stayed")


BODY = head("/v1/completions", 1000, key=KEY) + b"\r\n{"
SLOW = {
    "nothing": b"",
    "lines": b"\r\n",
    "head": b"POST /v1/completions HTTP/1.1\r\nx: ",
    "body": BODY,
    "body without a key": BODY.replace(KEY.encode(), b"no"),
    "body of a page": head("/v1/completions", 1000, f"origin: {PAGE}", key=KEY) + b"\r\n{",
    "body of a stranger": head("/v1/completions", 1000, "origin: https://else.example", key=KEY) + b"\r\n{",
}


@pytest.fixture(scope="module")
def at_once(server: Server) -> Iterator[dict[str, Future[Any]]]:
    """What clients found that make the server wait, which it does for all of them at once."""
    kinds = {"sends": send_slowly, "never reads": lose_answers, "reads": read_slowly, "waits": ask_twice}
    with ThreadPoolExecutor(len(kinds)) as threads:
        yield {name: threads.submit(each, server) for name, each in kinds.items()}


def send_slowly(server: Server) -> dict[str, bytes]:
    with ThreadPoolExecutor(len(SLOW)) as threads:
        return dict(zip(SLOW, threads.map(lambda first: slowly(server, first), SLOW.values()), strict=True))


def ask_twice(server: Server) -> list[tuple[int, Any]]:
    """What a client gets that uses its connection again after longer than a request may take to arrive.

    Returns the status of each answer, and the address that this side of the connection has after it.
    """
    where, found = urlsplit(server.url), []
    with contextlib.closing(HTTPConnection(str(where.hostname), where.port, timeout=30)) as client:
        for _ in range(2):
            client.request("GET", "/health", headers={"authorization": f"Bearer {KEY}"})
            answer = client.getresponse()
            answer.read()
            found.append((answer.status, client.sock.getsockname()))
            time.sleep(2 * ARRIVE_S)
    return found


@pytest.mark.slow
def test_a_connection_that_waits_for_its_next_request_stays(at_once: dict[str, Future[Any]]) -> None:
    first, again = at_once["waits"].result()
    assert first[0] == 200
    assert again == first


def test_requests_that_do_not_arrive_end_their_connections(at_once: dict[str, Future[Any]]) -> None:
    found = at_once["sends"].result()
    statuses = {name: answer.split()[1] for name, answer in found.items()}
    assert statuses == {**dict.fromkeys(SLOW, b"408"), "body without a key": b"401"}
    allowed = f"access-control-allow-origin: {PAGE}\r\n".encode()
    assert [name for name, answer in found.items() if b"access-control" in answer] == ["body of a page"]
    assert allowed in found["body of a page"]


STREAM = b'{"model": "letters", "prompt": "ab", "n": 64, "max_tokens": 120, "stream": true, "logprobs": 5, "seed": 1}'


def ask_for_streams(server: Server, times: int) -> socket.socket:
    """A client with little room for 2 MB, so many times, one request behind the other."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    where = urlsplit(server.url)
    client.connect((where.hostname, where.port))
    first = head("/v1/completions", len(STREAM), key=KEY).replace(b"connection: close\r\n", b"")
    client.sendall((first + b"\r\n" + STREAM) * times)
    return client


def lose_answers(server: Server) -> int:
    """Ask for answers larger than the system's buffers and read none; returns the sequences left once it is cut off."""
    deadline_s = time.monotonic() + 60
    with ask_for_streams(server, 6) as client:
        while client.getsockopt(socket.SOL_TCP, socket.TCP_INFO, 1) != bytes([_CLOSED]):
            assert time.monotonic() < deadline_s, "the connection is still there"
            time.sleep(0.1)
    with server.http() as http:
        while (num_left := http.get("/load").json()["sequences_under_way"]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
    return int(num_left)


def read_slowly(server: Server) -> bytes:
    """What a client is sent that reads for three times as long as a request may take to arrive."""
    with ask_for_streams(server, 1) as client:
        found, begin_s = b"", time.monotonic()
        while b"data: [DONE]" not in found[-9000:]:
            if time.monotonic() < begin_s + 3 * ARRIVE_S:
                time.sleep(0.3)
            found += (more := client.recv(1 << 16))
            assert more, "the connection has ended"
    return found


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answers_loses_them(at_once: dict[str, Future[Any]]) -> None:
    """What they need is free again."""
    assert at_once["never reads"].result() == 0


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_its_answer(at_once: dict[str, Future[Any]]) -> None:
    found = at_once["reads"].result()
    assert len(re.findall(rb'"finish_reason": ?"', found)) == 64


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["stated", "chunked"])
@pytest.mark.parametrize(("key", "status"), [(KEY, 413), ("no", 401)])
def test_a_body_that_is_too_large_gets_an_answer(server: Server, key: str, status: int, is_chunked: bool) -> None:
    """Also if the client sends all of it before it reads, and asks for the connection's end."""
    request = huge("/v1/completions", 100_000_000, key=key, is_chunked=is_chunked)
    assert request.send(server.url, timeout=60) == status


def test_a_client_that_asks_first_sends_no_body_that_is_too_large(server: Server) -> None:
    first = head("/v1/completions", 100_000_000, "expect: 100-continue", key=KEY).replace(b"connection: close\r\n", b"")
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as client:
        client.sendall(first + b"\r\n")
        answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("/health", ["x: " + "y" * 100_000]),
        ("/health", [f"x{number}: {'y' * 90}" for number in range(1000)]),
        ("/health?" + "y" * 100_000, []),
    ],
    ids=["long", "many", "path"],
)
def test_a_head_that_arrives_at_once_has_an_end(server: Server, path: str, lines: list[str]) -> None:
    assert Hostile(head(path, 0, *lines, key=KEY, method="GET") + b"\r\n").send(server.url, timeout=60) == 431


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", [b"", b"\r\n0\r\n"], ids=["head", "trailers"])
def test_heads_have_an_end(server: Server, end: bytes) -> None:
    first = head("/v1/completions", -1, "transfer-encoding: chunked", key=KEY) + end
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(first + b"".join(b"a%d: b\r\n" % number for number in range(1_000_000)))
        with contextlib.suppress(ConnectionError):
            assert client.recv(100).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_many_connections_hold_up_nobody(server: Server, alone: dict[str, str]) -> None:
    where = urlsplit(server.url)
    firsts = [*SLOW.values()] * 100
    with contextlib.ExitStack() as stack:
        for first in firsts:
            client = socket.create_connection((where.hostname, where.port), timeout=30)
            stack.enter_context(client).sendall(first)
        answer = server.client(timeout=60).completions.create(
            model="letters", prompt=PROMPTS[0], temperature=0, max_tokens=12
        )
    assert answer.choices[0].text == alone[PROMPTS[0]]


def test_a_key_leaves_room_for_others(server: Server) -> None:
    server.await_idle()
    options: dict[str, Any] = {"model": "letters", "max_tokens": 1}
    with pytest.raises(openai.RateLimitError, match="257 more than the others' share allows") as refused:
        server.client().completions.create(**options, prompt=["a"] * 257)
    assert refused.value.response.headers["retry-after"] == "1"
    assert len(server.client(api_key="b").completions.create(**options, prompt=["a"] * 256).choices) == 256


def test_keys_share_what_is_left() -> None:
    """Whatever greedy keys do, another one gets something."""
    refused = prometheus_client.Counter("refused", "For this test.", registry=None)
    admission = Admission(64, is_shared=True, refused=refused)
    with contextlib.ExitStack() as stack:
        for key, most in (("0", 32), ("1", 16), ("2", 8)):
            for _ in range(most):
                stack.enter_context(admission.admit(1, key))
            with pytest.raises(ApiError, match=f"{most} sequences of this key are under way, and 1 more"):
                stack.enter_context(admission.admit(1, key))
    with admission.admit(32, "2"), pytest.raises(ApiError, match="limit of 64"):
        stack.enter_context(admission.admit(33, "0"))
    with Admission(64, is_shared=False, refused=refused).admit(64, "0"):
        assert refused._value.get() == 4


def test_the_openapi_schema_has_the_bodies(server: Server) -> None:
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    for path, body in ROUTES.items():
        described = paths[path.replace("/mii/letters", "/mii/{deployment}")]["post"]["requestBody"]
        schema = described["content"]["application/json"]["schema"]
        assert set(schema.get("required", ())) <= set(body)
        assert set(body) <= set(schema["properties"]) or schema["additionalProperties"] is True
