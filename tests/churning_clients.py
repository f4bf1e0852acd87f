"""Clients that come, ask, and often leave before they are answered; and what a process holds."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hostile_requests import head


@dataclass
class ChurningClients:
    """So many clients at once, each of which asks again and again.

    Attributes:
        alone: prompts, and the text that each gets alone.
        num_new: tokens of an answer.
        found: how often what happened: "whole", "stream", "left", "refused".
    """

    url: str
    key: str
    alone: Mapping[str, str]
    num_new: int
    num_clients: int = 200

    def run(self, seconds: float, seed: int = 0) -> Counter[str]:
        """Let them ask for so long; raises if an answer is not the one that its prompt gets alone."""
        found = Counter[str]()

        async def all_of_them() -> None:
            end_s = time.monotonic() + seconds
            draws = [random.Random(f"{seed}-{number}") for number in range(self.num_clients)]
            async with asyncio.TaskGroup() as group:
                for draw in draws:
                    group.create_task(self._ask_until(end_s, draw, found))

        asyncio.run(all_of_them())
        return found

    async def _ask_until(self, end_s: float, draw: random.Random, found: Counter[str]) -> None:
        while time.monotonic() < end_s:
            try:
                async with asyncio.timeout(draw.expovariate(1) if draw.random() < 0.5 else 120):
                    found[await self._ask(draw)] += 1
            except TimeoutError:
                found["left"] += 1
            await asyncio.sleep(draw.random() * 0.2)

    async def _ask(self, draw: random.Random) -> str:
        prompts, streams = draw.sample([*self.alone], draw.choice((1, 1, 1, 4))), draw.random() < 0.5
        fields: dict[str, Any] = {"prompt": prompts, "temperature": 0, "max_tokens": self.num_new, "stream": streams}
        body = json.dumps(fields).encode()
        request = head("/v1/completions", len(body), key=self.key) + b"\r\n" + body
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            if draw.random() < 0.1:
                writer.write(request[: draw.randrange(len(request))])
                return "left"
            writer.write(request)
            first = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
            if b"429" in first:
                return "refused"
            assert b"200" in first, first
            if not streams:
                answer = json.loads(await reader.read())
                assert [each["text"] for each in answer["choices"]] == [self.alone[each] for each in prompts]
                return "whole"
            texts = [""] * len(prompts)
            num_events = draw.choice((1, 3, 10_000, 10_000))
            while num_events and (line := await reader.readline()):
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice["text"]
                    num_events -= 1
            if not num_events:
                return "left"
            assert texts == [self.alone[each] for each in prompts]
            return "stream"
        finally:
            if draw.random() < 0.5:
                writer.transport.abort()
            writer.close()


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    rss_bytes: int
    num_threads: int
    num_files: int

    @classmethod
    def by(cls, process_id: int) -> "Held":
        process = Path(f"/proc/{process_id}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        rss_bytes = int(status["VmRSS"].split()[0]) << 10
        return cls(rss_bytes, int(status["Threads"]), len([*(process / "fd").iterdir()]))
