"""Files for containers and systemd name what there is, and work as far as it can be seen here."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from guide_blocks import ROOT
from jobs_support import letters_model
from serve_support import KEY, serving
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.serve.service_manager import ServiceManager

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "zinfer@.service"


def settings(path: Path) -> dict[str, list[str]]:
    """The values of each name in a unit or an environment file."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"(?m)^(\w+)=(.*)$", path.read_text(encoding="utf-8")):
        found.setdefault(name, []).append(value)
    return found


def has_options(words: list[str]) -> None:
    """All options among these words are those of `zinfer serve`."""
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    options = [word for word in words if word.startswith("--")]
    assert options
    assert [each for each in options if not re.search(rf"{each}\b", shown)] == []


def test_the_unit_starts_the_server_with_options_that_there_are() -> None:
    unit, environment = settings(UNIT), settings(DEPLOY / "zinfer.env")
    program, command, *words = unit["ExecStart"][0].split()
    assert (Path(program).name, command) == ("zinfer", "serve")
    has_options([*words, *environment["ZINFER_OPTIONS"][0].split()])
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert "$ZINFER_OPTIONS" in words


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "zinfer@.service"
    text = UNIT.read_text().replace("/opt/zinfer/bin/zinfer", sys.executable)

    def said(written: str) -> list[str]:
        unit.write_text(written)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / "zinfer@llama.service")],
            env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
            capture_output=True,
            text=True,
        )
        return [line for line in done.stderr.splitlines() if "zinfer" in line]

    assert said(text) == []
    assert "Failed to parse sec value" in said(text.replace("WatchdogSec=60", "WatchdogSec=often"))[0]


def test_the_container_is_made_of_files_that_there_are() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    kinds = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {kind for kind, _ in lines} == kinds | {"ENTRYPOINT"}
    copied = [words.split() for kind, words in lines if kind == "COPY"]
    sources = [word for words in copied for word in words[:-1] if not word.startswith("--")]
    assert [each for each in sources if not (ROOT / each).exists()] == []
    let_in = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == set(sources)
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()
    entry = json.loads(next(words for kind, words in lines if kind == "ENTRYPOINT"))
    assert entry[:2] == ["zinfer", "serve"]
    has_options(entry)


def test_a_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch() -> None:
        watching = asyncio.create_task(ServiceManager().watch())
        await asyncio.sleep(0.05)
        watching.cancel()
        await asyncio.wait((watching,))

    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    asyncio.run(watch())  # nobody wants to be told
    name = f"@zinfer-test-{os.getpid()}"
    for address, bound in ((str(tmp_path / "notify"), str(tmp_path / "notify")), (name, name.replace("@", "\0"))):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as told:
            told.bind(bound)
            asyncio.run(watch())
            states = [told.recv(100)]
            while states[-1] != b"STOPPING=1":
                states.append(told.recv(100))
            assert states == [b"READY=1", *[b"WATCHDOG=1"] * (len(states) - 2), b"STOPPING=1"]
            assert len(states) >= 3
            monkeypatch.setenv("WATCHDOG_USEC", "200")
            asyncio.run(watch())  # nobody reads; the queue is full at once


@pytest.mark.slow
def test_health_and_the_service_manager_follow_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = letters_model(tmp_path / "letters")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    monkeypatch.setenv("ZINFER_API_KEY", KEY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(60)
        with serving(model, tmp_path, key=None) as server:
            assert [told.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
            assert health(server.url) == (0, "")
            monkeypatch.setenv("ZINFER_API_KEY", "other")
            assert health(server.url) == (1, f"{server.url} takes no requests: HTTP Error 401: Unauthorized\n")
            monkeypatch.setenv("ZINFER_API_KEY", KEY)
            os.kill(server.process.pid, signal.SIGTERM)
            while (state := told.recv(100)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"
            assert server.process.wait(timeout=60) == 0
            status, said = health(server.url)
    assert status == 1
    assert "Connection refused" in said


def health(url: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, DEPLOY / "health", url], capture_output=True, text=True)
    return done.returncode, done.stderr
