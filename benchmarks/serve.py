"""Compares `zinfer serve` with `LLM.generate` of the same rows, alone and with batches beside chats.

    python benchmarks/serve.py [--model examples/demo/model] [--rows 256 --prompt-len 24 --new 24] [--batch-rows 1000]

* ``saturated``: all rows sent at once, as streams and whole; ``over_offline`` is its tokens a second over those of
  ``LLM.generate`` with as many rows.
* ``http``: milliseconds of a request at ``--rate`` requests a second to a server whose replica answers at once, so
  HTTP's own time: reading, encoding, two processes, events. It counts from when the client has sent, which its timers
  let it do up to a millisecond late.
* ``batch``: ``--batch-rows`` rows in one batch, over offline; alone, and beside ``--chats`` chats that never pause.
  There the tokens of both count, and the chats' times stand beside those without a batch.

Texts must be those of ``LLM.generate``, or ``--least-same`` of them: passes of other sizes round otherwise, and a model
of random weights has tokens that are nearly as likely. Each timing is the best of ``--repeats`` on new prompts. The
last line is JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
from result import publish
from serve_load import Answer, Connection, Load, figures, streamed

from zinfer import LLM, SamplingParams

ROOT: Final = Path(__file__).resolve().parent.parent
_SERVING: Final = re.compile(r"serving \S+ on (http://\S+)/v1")
_PARTS: Final = ("http", "saturated", "batch")
_HTTP_TOKENS: Final = 16
_HTTP_S: Final = 5
_LOOK_EVERY_S: Final = 0.02

Bodies = list[dict[str, Any]]
Cases = dict[str, dict[str, Any]]


def bodies(count: int, prompt_len: int, max_tokens: int, vocab_size: int, seed: int) -> Bodies:
    """Bodies of random tokens."""
    draw = random.Random(seed)
    options = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return [{"prompt": [draw.randrange(3, vocab_size) for _ in range(prompt_len)], **options} for _ in range(count)]


class Offline:
    """`LLM.generate`, in this process."""

    def __init__(self, model: Path, config: Path | None, device: str) -> None:
        self.llm = LLM(str(model), config, device=device)

    def run(self, asked: Bodies) -> tuple[float, list[str]]:
        """Complete bodies; returns seconds and texts."""
        prompts = [{"prompt_token_ids": each["prompt"]} for each in asked]
        params = [SamplingParams(max_new_tokens=each["max_tokens"], temperature=0.0, ignore_eos=True) for each in asked]
        begin_s = time.perf_counter()
        found = self.llm.generate(prompts, params)
        return time.perf_counter() - begin_s, [each.text for each in found]


def give_back_memory() -> None:
    """Give back the device memory that torch keeps of a closed LLM: a server, another process, needs it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def server(command: Sequence[str | Path]) -> Iterator[str]:
    """A server's URL, once it listens."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    assert process.stdout is not None
    said = ""
    try:
        while (found := _SERVING.search(said)) is None:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended: {said}")
            said += line
        more = deque[str](maxlen=50)
        Thread(target=more.extend, args=(process.stdout,), daemon=True).start()  # a full pipe would stop the server
        try:
            yield found[1]
        except AssertionError as error:
            raise RuntimeError(f"{error}; the server said: {''.join(more) or 'nothing'}") from error
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def send(url: str, asked: Bodies, *, rate: float | None = None, concurrency: int = 4096) -> list[Answer]:
    """Send bodies as texts; all must be answered."""
    answers = asyncio.run(Load(url, None, "/v1/completions", rate=rate, concurrency=concurrency).run(asked))
    errors = [each.error for each in answers if each.error is not None]
    assert not errors, errors[0]
    return answers


def send_beside(url: str, asked: Bodies, rate: float, *options: str) -> dict[str, Any]:
    """Send bodies from another process, whose memory holds no models to be looked through; returns its figures."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps({"url": "/v1/completions", "body": body}) + "\n" for body in asked)
        file.flush()
        command = [sys.executable, str(ROOT / "benchmarks" / "serve_load.py"), "--url", url, "--input", file.name]
        command += ["--requests", str(len(asked)), "--rate", str(rate), *options]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert not found["errors"], said
    return found


def check_texts(found: Sequence[str], wanted: Sequence[str], least: float) -> float:
    """The share of texts that are equal; ``least`` must be."""
    same = sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted)
    assert same >= least, f"only {same:.1%} of the texts are those of LLM.generate"
    return same


async def run_batch(url: str, asked: Bodies) -> tuple[float, list[str]]:
    """Complete bodies as one batch; returns seconds from its creation to its end, and the texts."""
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": each}
        for number, each in enumerate(asked)
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    connection = Connection(url, None)
    file = await connection.json("POST", "/v1/files", *_form(data))
    begin_s = time.perf_counter()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await connection.json("POST", "/v1/batches", json.dumps(wanted).encode())
    while batch["status"] != "completed":
        assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
        await asyncio.sleep(_LOOK_EVERY_S)
        batch = await connection.json("GET", f"/v1/batches/{batch['id']}")
    seconds = time.perf_counter() - begin_s
    _, parts = await connection.request("GET", f"/v1/files/{batch['output_file_id']}/content")
    lines = b"".join([part async for part in parts]).splitlines()
    connection.close()
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in map(json.loads, lines)}
    return seconds, [texts[str(number)] for number in range(len(asked))]


def _form(data: bytes) -> tuple[bytes, str]:
    """A file for a batch as a form, and the form's kind."""
    parts = [
        b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
        data + b"\r\n--edge--\r\n",
    ]
    return b"".join(parts), "multipart/form-data; boundary=edge"


@asynccontextmanager
async def chatting(url: str, asked: Bodies, num_chats: int) -> AsyncIterator[list[Answer]]:
    """Chats that never pause, each a request after the other; yields the answers so far."""
    load, ended = Load(url, None, "/v1/completions"), asyncio.Event()
    answers: list[Answer] = []
    numbers = count()

    async def talk() -> None:
        connection = Connection(url, None)
        while not ended.is_set():
            answer = Answer(time.perf_counter())
            await load.send(connection, asked[next(numbers) % len(asked)], answer)
            assert answer.error is None, answer.error
            answers.append(answer)
        connection.close()

    talks = [asyncio.create_task(talk()) for _ in range(num_chats)]
    try:
        yield answers
    finally:
        ended.set()
        await asyncio.gather(*talks)


async def chats_alone(url: str, asked: Bodies, num_chats: int, seconds: float) -> dict[str, Any]:
    """The times of chats without a batch."""
    async with chatting(url, asked, num_chats) as answers:
        await asyncio.sleep(seconds)
    return figures(answers)


async def beside_chats(url: str, rows: Bodies, chats: Bodies, num_chats: int) -> tuple[float, int, dict[str, Any]]:
    """Seconds of a batch beside chats, the chats' tokens in that time, and their times."""
    async with chatting(url, chats, num_chats) as answers:
        await asyncio.sleep(_LOOK_EVERY_S)
        seconds, _ = await run_batch(url, rows)
        done = list(answers)
    return seconds, sum(each.num_tokens for each in done), figures(done)


class Benchmark:
    """The parts of the benchmark, on new prompts each time: those of before are in the prefix cache."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
        self._seeds = count(1)
        self.rows, self.batches = (
            [self._new(each) for _ in range(args.repeats)] for each in (args.rows, args.batch_rows)
        )
        self._row_tokens, self._batch_tokens = args.rows * args.new, args.batch_rows * args.new
        self._rows_offline: list[tuple[float, list[str]]] = []
        self._batches_offline: list[tuple[float, list[str]]] = []

    def offline(self) -> dict[str, float]:
        """Tokens a second of `LLM.generate`."""
        args = self._args
        offline = Offline(args.model, args.config, args.device)
        with offline.llm:
            offline.run(self._new(args.rows))
            self._rows_offline = [offline.run(each) for each in self.rows]
            self._batches_offline = [offline.run(each) for each in self.batches]
        give_back_memory()
        self._rows_per_s = self._row_tokens / min(seconds for seconds, _ in self._rows_offline)
        self._batch_per_s = self._batch_tokens / min(seconds for seconds, _ in self._batches_offline)
        return {"rows_tokens_per_s": round(self._rows_per_s, 1), "batch_tokens_per_s": round(self._batch_per_s, 1)}

    def saturated(self, url: str) -> Cases:
        """All rows at once, as streams and whole."""
        send(url, self._new(self._args.rows))
        ran = [send(url, streamed(each)) for each in self.rows]
        same = [
            check_texts([each.text for each in answers], wanted, self._args.least_same)
            for answers, (_, wanted) in zip(ran, self._rows_offline, strict=True)
        ]
        found: Cases = {}
        for name, several in (("streams", ran), ("whole", [send(url, self._new(self._args.rows)) for _ in self.rows])):
            best = max(map(figures, several), key=lambda each: each["tokens_per_s"])
            found[f"saturated, {name}"] = {**best, "over_offline": round(best["tokens_per_s"] / self._rows_per_s, 3)}
        found["saturated, streams"]["same_texts"] = min(same)
        return found

    def batch(self, url: str) -> Cases:
        """Batches alone, and one beside chats."""
        ran = [asyncio.run(run_batch(url, each)) for each in self.batches]
        for (_, texts), (_, wanted) in zip(ran, self._batches_offline, strict=True):
            check_texts(texts, wanted, self._args.least_same)
        best_s, num_chats = min(seconds for seconds, _ in ran), self._args.chats
        chats = streamed(self._new(num_chats * 64))
        alone = asyncio.run(chats_alone(url, chats, num_chats, best_s))
        seconds, chat_tokens, beside = asyncio.run(
            beside_chats(url, self._new(self._args.batch_rows), chats, num_chats)
        )
        return {
            "batch alone": self._over_offline(self._batch_tokens, best_s),
            "batch beside chats, tokens of both": self._over_offline(self._batch_tokens + chat_tokens, seconds),
            "chats beside the batch": {**beside, **_waited(beside["first_token_ms"])},
            "chats alone": {**alone, **_waited(alone["first_token_ms"])},
        }

    def http(self, url: str) -> Cases:
        """Milliseconds of requests that need no computing."""
        rate = self._args.rate
        asked = bodies(int(_HTTP_S * rate), self._args.prompt_len, _HTTP_TOKENS, self._vocab_size, 0)
        send(url, asked[:50])
        found = {}
        for name, options in (("whole", ("--whole",)), ("streams", ())):
            times = send_beside(url, asked, rate, *options)["answer_ms"]
            found[f"HTTP alone, {rate:g} requests/s, {name}"] = {"median_ms": times["p50"], "most_ms": times["p99"]}
        return found

    def _over_offline(self, num_tokens: int, seconds: float) -> dict[str, float]:
        per_s = num_tokens / seconds
        return {"tokens_per_s": round(per_s, 1), "over_offline": round(per_s / self._batch_per_s, 3)}

    def _new(self, number: int) -> Bodies:
        return bodies(number, self._args.prompt_len, self._args.new, self._vocab_size, next(self._seeds))


def _waited(first_ms: dict[str, float]) -> dict[str, float]:
    return {"first_median_ms": first_ms["p50"], "first_most_ms": first_ms["p95"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo" / "model")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=24)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--batch-rows", type=int, default=1000)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--least-same", type=float, default=0.99)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    benchmark = Benchmark(args)
    cases: Cases = {}
    found: dict[str, Any] = {"benchmark": "serve", "model": args.model.name, "cases": cases}
    found |= {name: getattr(args, name) for name in ("rows", "prompt_len", "new", "batch_rows", "chats")}
    if "http" in args.parts:
        with server([ROOT / "benchmarks" / "serve_stand_in.py", args.model]) as url:
            cases |= benchmark.http(url)
    computed = [each for each in args.parts if each != "http"]
    if computed:
        found["offline"] = benchmark.offline()
        command: list[str | Path] = ["-m", "zinfer", "serve", "--model", args.model, "--device", args.device]
        command += [] if args.config is None else ["--config", args.config]
        with tempfile.TemporaryDirectory() as files, server([*command, "--port", "0", "--files", files]) as url:
            for name in computed:
                cases |= getattr(benchmark, name)(url)
    publish(found, args.out)


if __name__ == "__main__":
    main()
