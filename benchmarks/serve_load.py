"""Sends requests to a server with OpenAI's interface at random times, and says how fast they are answered.

    python benchmarks/serve_load.py --url http://127.0.0.1:8000 --api-key secret --rate 4 --requests 200

Arrivals are a Poisson process of ``--rate`` requests a second; without it all come at once. At most ``--concurrency``
are under way. Prompts are random words, about ``--prompt-len`` tokens, or the bodies of ``--input``, rows of OpenAI's
batch format; answers have ``--max-tokens`` tokens (``ignore_eos``, which zinfer and vLLM know). Seconds count from the
time at which a request was due, but ``answer_ms`` from when it was sent. It needs nothing but Python; the last line is
JSON.
"""

import argparse
import asyncio
import json
import random
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

_WORDS: Final = "time year people way day man thing woman life child world school state family student group hand part"
_LIMIT_BYTES: Final = 1 << 22
_MOST_ERRORS: Final = 3


@dataclass
class Answer:
    """What became of one request; seconds are those of one clock.

    Attributes:
        due_s: when it should have been sent; ``sent_s``: when it was; ``ended_s``: when its answer was whole.
        times_s: when each event with text came.
        text: of its first choice.
        num_tokens: new tokens as the server counts them.
        error: what went wrong.
    """

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    error: str | None = None


class Connection:
    """An HTTP/1.1 connection that is kept between requests."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = [f"Host: {parts.netloc}", *([f"Authorization: Bearer {key}"] if key else [])]
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, AsyncIterator[bytes]]:
        """Send a request; returns its status and the parts of its body, which must be read to the end."""
        if self._reader is None or self._writer is None or self._reader.at_eof() or self._writer.is_closing():
            context = ssl.create_default_context() if self._tls else None
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, ssl=context, limit=_LIMIT_BYTES
            )
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *self._headers, f"Content-Type: {kind}"]
        self._writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        return int(head[0].split()[1]), _parts(self._reader, fields)

    async def json(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
        """Send a request, and return its answer. Raises RuntimeError if it is an error."""
        status, parts = await self.request(method, path, body, kind)
        whole = b"".join([part async for part in parts])
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {whole[:500].decode(errors='replace')}")
        return json.loads(whole)

    def close(self) -> None:
        """Close it; the next request opens it again."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _parts(reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" not in fields.get("transfer-encoding", ""):
        yield await reader.readexactly(int(fields.get("content-length", 0)))
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


class Load:
    """Sends bodies to one route, and notes what comes back.

    Args:
        key: API key.
        path: of the route.
        rate: requests a second; None: all at once.
        concurrency: most requests under way.
    """

    def __init__(
        self, url: str, key: str | None, path: str, *, rate: float | None = None, concurrency: int = 1024
    ) -> None:
        self._url, self._key, self._path, self._rate, self._concurrency = url, key, path, rate, concurrency

    async def run(self, bodies: Sequence[dict[str, Any]], seed: int = 0) -> list[Answer]:
        """Send all bodies, and return their answers in the same order."""
        draw, due_s = random.Random(seed), time.perf_counter()
        answers = [Answer(0.0) for _ in bodies]
        idle = [Connection(self._url, self._key) for _ in range(min(self._concurrency, len(bodies)))]
        free = asyncio.Semaphore(len(idle))

        async def send(body: dict[str, Any], answer: Answer) -> None:
            async with free:
                connection = idle.pop()
                await self.send(connection, body, answer)
                idle.append(connection)

        async with asyncio.TaskGroup() as group:
            for body, answer in zip(bodies, answers, strict=True):
                answer.due_s = due_s
                await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
                group.create_task(send(body, answer))
                due_s += draw.expovariate(self._rate) if self._rate else 0.0
        for connection in idle:
            connection.close()
        return answers

    async def send(self, connection: Connection, body: dict[str, Any], answer: Answer) -> None:
        """Send one body, and read its answer."""
        answer.sent_s = time.perf_counter()
        try:
            status, parts = await connection.request("POST", self._path, json.dumps(body).encode())
            if status == 200 and body.get("stream"):
                await _read_stream(parts, answer)
            else:
                whole = json.loads(b"".join([part async for part in parts]))
                answer.error = None if status == 200 else f"{status} {whole}"[:500]
                if status == 200:
                    answer.times_s.append(time.perf_counter())
                    answer.text = _text(whole["choices"][0])
                    answer.num_tokens = whole["usage"]["completion_tokens"]
        except (OSError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            connection.close()
        answer.ended_s = time.perf_counter()


async def _read_stream(parts: AsyncIterator[bytes], answer: Answer) -> None:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        now_s = time.perf_counter()
        for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = str(event["error"])[:500]
                continue
            text = "".join(_text(each) for each in event["choices"])
            if text:
                answer.times_s.append(now_s)
                answer.text += text
            answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", answer.num_tokens)


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta")
    return (part.get("content") or "") if part is not None else choice.get("text", "")


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Requests and tokens a second, and the milliseconds that were waited, by percentile."""
    done = [each for each in answers if each.error is None]
    begin_s = min(each.due_s for each in answers)
    seconds = max(each.ended_s for each in answers) - begin_s
    between = [
        (end_s - first_s) / (len(each.times_s) - 1)
        for each in done
        if len(each.times_s) > 1
        for first_s, end_s in [(each.times_s[0], each.times_s[-1])]
    ]
    num_tokens = sum(each.num_tokens for each in done)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds, 1),
        "first_token_ms": percentiles([each.times_s[0] - each.due_s for each in done if each.times_s]),
        "between_tokens_ms": percentiles(between),
        "request_ms": percentiles([each.ended_s - each.due_s for each in done]),
        "answer_ms": percentiles([each.ended_s - each.sent_s for each in done]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 90th, 95th and 99th percentile in milliseconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    shown = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    found = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in shown.items()}
    return {name: round(1e3 * value, 2) for name, value in {**found, "mean": statistics.fmean(ordered)}.items()}


def random_bodies(
    count: int, prompt_len: int, max_tokens: int, *, is_chat: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """Bodies of random words, which share no prefix."""
    draw, words = random.Random(seed), _WORDS.split()
    bodies = []
    for _ in range(count):
        text = " ".join(draw.choices(words, k=prompt_len))
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        bodies.append({**asked, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
    return bodies


def streamed(bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same bodies, for answers as streams."""
    return [{**each, "stream": True, "stream_options": {"include_usage": True}} for each in bodies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="name that requests have; by default the server's first")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, help="requests a second; without it all come at once")
    parser.add_argument("--concurrency", type=int, default=1024, help="most requests under way")
    parser.add_argument("--prompt-len", type=int, default=128, help="words of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--input", type=Path, help="rows of OpenAI's batch format, whose bodies are sent")
    parser.add_argument("--chat", action="store_true", help="send chats, not texts")
    parser.add_argument("--whole", action="store_true", help="ask for answers that are no streams")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    if args.input is not None:
        rows = [json.loads(line) for line in args.input.read_text(encoding="utf-8").splitlines() if line.strip()]
        path, bodies = rows[0]["url"], [row["body"] for row in rows][: args.requests]
    else:
        bodies = random_bodies(args.requests, args.prompt_len, args.max_tokens, is_chat=args.chat, seed=args.seed)

    async def run() -> list[Answer]:
        connection = Connection(args.url, args.api_key)
        name = args.model or (await connection.json("GET", "/v1/models"))["data"][0]["id"]
        connection.close()
        named = [{**each, "model": name} for each in (bodies if args.whole else streamed(bodies))]
        load = Load(args.url, args.api_key, path, rate=args.rate, concurrency=args.concurrency)
        return await load.run(named, args.seed)

    answers = asyncio.run(run())
    found = figures(answers)
    for error in [each.error for each in answers if each.error is not None][:_MOST_ERRORS]:
        print(f"error: {error}")
    for name in ("first_token_ms", "between_tokens_ms", "request_ms"):
        print(f"{name}: {found[name]}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
