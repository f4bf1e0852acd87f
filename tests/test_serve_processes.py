"""Processes of a server: killed replicas, ranks, the end by a signal, TLS, settings that do not work."""

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import psutil
import pytest
from commands import start
from interrupted_import import interrupt_import_beside
from jobs_support import letters_model
from serve_support import Server, serving

from zinfer.serve import replica
from zinfer.serve.replica_process import ReplicaProcess

LONG: dict[str, Any] = {"model": "letters", "prompt": "ab", "max_tokens": 120, "temperature": 0}
LONG |= {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server"), "--replicas", "2") as server:
        yield server


def answers_as_one_is_killed(server: Server, client: openai.OpenAI) -> list[object]:
    """Ask eight times, and kill a replica once the four answers that are streamed have begun: texts, and errors."""
    found: list[object] = []
    has_begun = [threading.Event() for _ in range(4)]

    def ask(number: int) -> None:
        """A request whose answer has begun is not given to the other replica."""
        try:
            if number < len(has_begun):
                text = ""
                for chunk in client.completions.create(**LONG, stream=True):
                    text += chunk.choices[0].text
                    has_begun[number].set()
                found.append(text)
            else:
                found.append(client.completions.create(**LONG).choices[0].text)
        except openai.APIError as error:
            found.append((getattr(error, "status_code", 503), str(error)))

    victim = server.replica_ids()[0]
    askers = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for asker in askers:
        asker.start()
    assert all(each.wait(60) for each in has_begun)
    os.kill(victim, signal.SIGKILL)
    for asker in askers:
        asker.join(60)
    return found


def test_a_killed_replica_fails_its_requests_and_comes_back(server: Server) -> None:
    client = server.client()
    whole = client.completions.create(**LONG).choices[0].text
    lost: list[object] = []
    for num_kills in range(1, 9):  # its answers may have ended before the last of the others' began
        found = answers_as_one_is_killed(server, client)
        assert len(found) == 8
        lost = [each for each in found if each != whole]
        wait_until_back(server, client, num_kills)
        if lost:
            break
    assert 0 < len(lost) < 8
    for status, text in lost:  # type: ignore[misc]
        assert status == 503
        assert "was killed by SIGKILL; it is started again" in text
    assert client.completions.create(**LONG).choices[0].text == whole
    killed = [server.process.stderr.readline() for _ in range(2 * num_kills)]
    ends = ("was killed by SIGKILL; it is started again in 1 s\n", "takes requests again\n")
    assert [line.startswith("zinfer: replica ") and line.endswith(ends) for line in killed] == [True] * len(killed)


def wait_until_back(server: Server, client: openai.OpenAI, num_kills: int) -> None:
    """Wait until all replicas are ready, after so many restarts; the other one answers meanwhile."""
    deadline = time.monotonic() + 120
    while True:
        replicas: list[dict[str, Any]] = server.load()["replicas"]  # type: ignore[assignment]
        if all(each["is_ready"] for each in replicas) and sum(each["restarts"] for each in replicas) >= num_kills:
            break
        assert time.monotonic() < deadline
        assert client.completions.create(model="letters", prompt="a", max_tokens=1).choices
        time.sleep(0.2)
    assert sum(each["restarts"] for each in replicas) == num_kills


def be_impatient() -> None:
    """Let the server of this process wait for 2 s until a replica hangs."""
    replica._MOST_SILENT_S = 2  # type: ignore[misc]


@pytest.mark.slow
def test_a_replica_that_hangs_is_killed(model: Path, tmp_path: Path) -> None:
    """Its requests that have got nothing yet are answered by the other one."""
    how: dict[str, Any] = {"prepare": (be_impatient, ()), "warms_others": False}
    with serving(model, tmp_path, "--replicas", "2", **how) as server, ThreadPoolExecutor(8) as threads:
        client = server.client(timeout=60)
        whole = client.completions.create(**LONG).choices[0].text
        victim = server.replica_ids()[0]
        os.kill(victim, signal.SIGSTOP)
        calls = [threads.submit(client.completions.create, **LONG) for _ in range(8)]
        assert [each.result().choices[0].text for each in calls] == [whole] * 8
        assert [each["is_ready"] for each in server.load()["replicas"]].count(True) == 1  # type: ignore[attr-defined]
        assert victim not in server.replica_ids()
    said = server.process.stderr.read()
    assert re.search("zinfer: replica [01] has said nothing for 2 s and was killed; it is started again in 1 s\n", said)


def test_a_replica_that_waits_to_be_started_again_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S", "_CLOSE_S"):
        monkeypatch.setattr(replica, name, 3600)

    async def close_in_a_pause() -> None:
        each = replica.Replica(0, ReplicaProcess(["false"], tmp_path / "socket"))
        was_ready = asyncio.get_running_loop().create_future()
        was_ready.set_result(None)
        each._running = asyncio.create_task(each._run(was_ready))
        while "it is started again in 3600 s" not in caplog.text:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await each.close()
        assert each.num_restarts == 0

    asyncio.run(close_in_a_pause())


def test_sigterm_lets_requests_end_and_leaves_nothing(server: Server) -> None:
    client, text = server.client(), ""
    replicas, whole = server.replica_ids(), client.completions.create(**LONG).choices[0].text
    for number, chunk in enumerate(client.completions.create(**LONG, stream=True)):
        if number == 5:
            server.process.send_signal(signal.SIGTERM)
        text += chunk.choices[0].text
    assert text == whole
    assert server.process.wait(timeout=60) == 0
    assert not any(Path(f"/proc/{each}").exists() for each in replicas)


@pytest.mark.slow
def test_requests_that_outlast_the_drain_are_told_so(model: Path, tmp_path: Path) -> None:
    """The replica stands still meanwhile, so that none of them ends by itself; one has not arrived as a whole."""
    how: dict[str, Any] = {"warms_others": False, "key": None}
    with ThreadPoolExecutor(9) as threads, serving(model, tmp_path, "--drain", "1", **how) as server:
        said, url = threads.submit(server.process.stderr.read), urlsplit(server.url)
        with server.http() as http, socket.create_connection((url.hostname, url.port), timeout=60) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{")
            answers, events = cut_short_by_the_end(server, http, threads)
            slow_answer = slow.recv(1000)
        assert server.process.wait(timeout=60) == 0
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"].startswith("the server is ending")
    assert "choices" in events[0]
    assert events[-1]["error"]["type"] == "server_error"
    assert slow_answer.startswith(b"HTTP/1.1 503")
    assert "Traceback" not in said.result()


def cut_short_by_the_end(
    server: Server, http: httpx.Client, threads: ThreadPoolExecutor
) -> tuple[list[httpx.Response], list[Any]]:
    """End a server whose replica stands still: seven answers, and the events of a stream that had begun."""
    body = {"prompt": "ab", "max_tokens": 120, "ignore_eos": True}
    streamed, (victim,) = {**body, "stream": True}, server.replica_ids()
    for _ in range(8):  # the stream may end before the replica is stopped
        try:
            with http.stream("POST", "/v1/completions", json=streamed) as stream:
                lines = stream.iter_lines()
                first = next(lines)
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.5)  # what it had sent before
                if not server.load()["sequences_under_way"]:
                    continue
                calls = [threads.submit(http.post, "/v1/completions", json=each) for each in [*[body] * 6, streamed]]
                while server.load()["sequences_under_way"] != 8:
                    time.sleep(0.05)
                server.process.send_signal(signal.SIGTERM)
                answers = [each.result() for each in calls]
                return answers, [json.loads(each.removeprefix("data: ")) for each in (first, *lines) if each]
        finally:
            os.kill(victim, signal.SIGCONT)
    raise AssertionError("the stream ended each time")


@contextmanager
def serving_at(path: Path, model: Path, *options: str) -> Iterator[tuple[httpx.Client, list[str]]]:
    """A client of a server at a Unix socket, and the lines that the server says, all of them once it has ended."""
    words = ["serve", "--model", str(model), "--device", "cpu", "--uds", path.name, *options]
    process, lines = start(words, path.parent, warm=True), list[str]()
    try:
        while not lines or "serving" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://a") as http:
            yield http, lines
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    lines += process.stderr.readlines()


def test_a_unix_socket_behind_a_proxy(model: Path, tmp_path: Path) -> None:
    """Whose prefix is that of the addresses in the schema. Nothing is said but what is served, and no file stays."""
    options = ("--root-path", "/models/a/", "--api-key", "k")
    with serving_at(tmp_path / "a.sock", model, *options) as (http, lines):
        assert http.get("/").status_code == 200, "the page needs no key"
        assert http.get("/v1/models").status_code == 401
        http.headers["authorization"] = "Bearer k"
        assert http.get("/openapi.json").json()["servers"] == [{"url": "/models/a"}]
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert len(lines) == 2
    assert lines[0].startswith("zinfer: requests of ")
    assert lines[1] == "zinfer: serving letters on a.sock\n"
    assert not (tmp_path / "a.sock").exists()


@pytest.mark.slow
def test_the_socket_of_a_successor_stays(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with serving_at(path, model):
        path.rename(tmp_path / "old.sock")
        path.touch()
    assert path.exists()


@pytest.mark.slow
def test_two_ranks_share_a_replica_behind_tls(model: Path, tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*made, "-keyout", names[0], "-out", names[1]], check=True, capture_output=True)
    config = tmp_path / "tensor.json"
    config.write_text('{"tensor_parallel": {"tp_size": 2}}')
    options = ("--config", str(config), "--ranks", "2", "--ssl-keyfile", names[0], "--ssl-certfile", names[1])
    with serving(model, tmp_path, *options, key=None) as server:
        assert server.url.startswith("https://")
        trusted = httpx.Client(verify=ssl.create_default_context(cafile=names[1]))
        url = server.url.replace("127.0.0.1", "localhost")
        answer = trusted.post(f"{url}/v1/completions", json={"prompt": "abc", "temperature": 0, "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5


NOTING = """
import os, sys
if "replica" in sys.orig_argv:
    open(f"replica-{os.getpid()}", "w").close()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_replicas_start_before_the_server_imports_torch_and_end_with_it(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    prepare = (interrupt_import_beside, ("torch", int(number), "replica-*"))
    words = ["serve", "--model", str(model), "--device", "cpu", "--port", "0"]
    process = start(words, tmp_path, warm=False, prepare=prepare, variables=variables)
    _, said = process.communicate(timeout=120)  # which the replica would write to
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert said.count("\n") == (number != signal.SIGKILL), "a replica says nothing"
    [note] = tmp_path.glob("replica-*")
    deadline = time.monotonic() + 60
    while lives(int(note.name.partition("-")[2])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "./nowhere"], "'./nowhere': no such folder"),
        (["--draft-model", "./nowhere"], "--draft-model: './nowhere': no such folder"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile and --ssl-keyfile go together"),
        (["--config", "bad.json"], "unknown"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--api-key", "a", "--api-key", " "], "--api-key is empty"),
    ],
)
def test_settings_that_do_not_work_end_the_command(model: Path, tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "bad.json").write_text('{"zero_optimisation": {}}')
    base = [] if "--model" in options else ["--model", str(model)]
    process = start(["serve", "--device", "cpu", *base, *options], tmp_path, warm=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert words in said
    assert "Traceback" not in said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "TAKEN"], "another program listens there; end it, or give another --port (0: any that is free)"),
        (["--port", "0", "--host", "nohost.invalid"], "cannot listen on nohost.invalid port 0: "),
        (["--uds", "/nonexistent/a"], "--uds /nonexistent/a: there is no folder /nonexistent; make it"),
        (["--uds", "a" * 108], "has more than 107 bytes; give a shorter path"),
        (
            ["--ssl-certfile", "/nonexistent", "--ssl-keyfile", "/nonexistent"],
            "/nonexistent cannot be used: No such file",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_named(model: Path, tmp_path: Path, options: list[str], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [str(taken.getsockname()[1]) if each == "TAKEN" else each for each in options]
        process = start(["serve", "--model", str(model), "--device", "cpu", *given], tmp_path, warm=True)
        said = process.stderr.read()
        assert process.wait(timeout=60) == 2
    assert said.startswith("zinfer: error: ")
    assert words in said
    assert said.count("\n") == 1
