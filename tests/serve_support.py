"""Starts `zinfer serve` for tests, and clients of it."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
from commands import Process, start

KEY = "a-key"
_SERVING = re.compile(r"serving (\S+) on (https?://\S+)/v1\n")


@dataclass
class Server:
    """A server that listens; `said` is what it printed until then."""

    process: Process
    url: str
    said: str

    def client(self, **options: object) -> openai.OpenAI:
        """OpenAI's client, which sends each request once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, **options})

    def http(self) -> httpx.Client:
        """A plain client with the key."""
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def load(self) -> dict[str, object]:
        with self.http() as http:
            found: dict[str, object] = http.get("/load").json()
        return found

    def await_idle(self) -> None:
        """Wait until what clients that are gone have asked for has ended."""
        deadline = time.monotonic() + 30
        while self.load()["sequences_under_way"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def replica_ids(self) -> list[int]:
        """Processes that compute, as children of the server; if it warms others, those that stand in for them."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(each) for each in children if "replica" in Path(f"/proc/{each}/cmdline").read_text().split("\0")]


@contextmanager
def serving(model: Path, folder: Path, *options: str, key: str | None = KEY, **how: Any) -> Iterator[Server]:
    """A server of a model on the CPU; it must end by SIGTERM with exit code 0 unless it has ended before.

    Args:
        how: it is started, as for `start`.
    """
    arguments = ["serve", "--model", str(model), "--device", "cpu", "--port", "0", *options]
    if key is not None:
        arguments += ["--api-key", key]
    process = start(arguments, folder, warm=True, **how)
    said = ""
    while (found := _SERVING.search(said)) is None:
        line = process.stderr.readline()
        assert line, f"the server ended: {said}"
        said += line
    try:
        yield Server(process, found[2], said)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
