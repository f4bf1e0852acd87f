"""A request that ends replicas fails alone: those that are under way beside it are answered, and replicas come back."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_support import letters_model, letters_tokenizer
from openai_support import text
from serve_support import Server, serving
from test_serve_batches import begin, ended, rows_of

from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.sampling_params import SamplingParams
from zinfer.scheduling.precedence import Precedence
from zinfer.serve.errors import Lost, RequestFailed
from zinfer.serve.known_prefixes import KnownPrefixes
from zinfer.serve.prompts import Encoded
from zinfer.serve.service import Service, ServiceLimits
from zinfer.serve.suspects import Case

KILLER: Final = "Z"
KILLING: Final = """
import os, signal, torch

embed = torch.nn.functional.embedding

def embed_or_end(ids, *rest, **named):
    if (ids == int(os.environ["TEST_TOKEN"])).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return embed(ids, *rest, **named)

torch.nn.functional.embedding = embed_or_end
"""
"""Ends a replica in the pass that computes the killer's prompt."""
NUM_OTHERS: Final = 199  # and the killer
LETTERS: Final = letters_tokenizer()("abcdefgh").input_ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


def variables(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(KILLING)
    (token,) = letters_tokenizer()(KILLER).input_ids
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "TEST_TOKEN": str(token)}


def body(number: int, killers: frozenset[int] = frozenset({NUM_OTHERS // 2})) -> dict[str, Any]:
    """One of 200 requests, of which some end the replica that computes them."""
    prompt = KILLER if number in killers else "ab" * (number % 9 + 1)
    given = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return {"model": "letters", "allowed_token_ids": LETTERS, **given}


def await_replicas(server: Server, num_restarts: int, most_restarts: int | None = None) -> None:
    deadline = time.monotonic() + 60
    while True:
        replicas: Any = server.load()["replicas"]
        if all(each["is_ready"] for each in replicas) and sum(each["restarts"] for each in replicas) >= num_restarts:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert num_restarts <= sum(each["restarts"] for each in replicas) <= (most_restarts or num_restarts)


@pytest.mark.slow
@pytest.mark.parametrize("killers", [{99}, pytest.param({40, 99}, marks=pytest.mark.slow)], ids=["one", "two"])
def test_a_request_that_ends_replicas_fails_alone(model: Path, tmp_path: Path, killers: set[int]) -> None:
    """Each is tried twice; those beside it are answered. Two may end one replica, or one each, when first tried."""
    with serving(model, tmp_path, "--replicas", "2", variables=variables(tmp_path)) as server, server.http() as http:

        def ask(number: int) -> httpx.Response:
            return http.post("/v1/completions", json=body(number, frozenset(killers)), timeout=120)

        with ThreadPoolExecutor(NUM_OTHERS + 1) as threads:
            answers = list(threads.map(ask, range(NUM_OTHERS + 1)))
        failed = [each for each in answers if each.status_code != 200]
        assert [each.status_code for each in failed] == [500] * len(killers), [each.text for each in failed]
        assert failed == [answers[number] for number in sorted(killers)]
        for each in failed:
            error = each.json()["error"]
            assert error["type"] == "server_error"
            assert "was killed by SIGKILL; this request was the cause, twice, and is not tried" in error["message"]
        await_replicas(server, len(killers) + 1, 2 * len(killers))
        assert {each.json()["choices"][0]["text"] for each in answers if each not in failed} == {
            ask(number).json()["choices"][0]["text"] for number in range(9)
        }


@pytest.mark.slow
def test_a_row_that_ends_replicas_fails_alone(model: Path, tmp_path: Path) -> None:
    """All others of its batch are answered, once. A killed server leaves the suspicion to the next one."""
    rows = [text(f"row-{number}", **body(number)) for number in range(NUM_OTHERS + 1)]
    with serving(model, tmp_path, "--files", "kept", variables=variables(tmp_path)) as server:
        name = begin(server.client(), rows)
        while not list((tmp_path / "kept").rglob("*.suspects")):
            time.sleep(0.01)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=30)
    with serving(model, tmp_path, "--files", "kept", variables=variables(tmp_path)) as server:
        client = server.client()
        batch = ended(client, name)
        assert batch.status == "completed"
        found, errors = rows_of(client, batch.output_file_id), rows_of(client, batch.error_file_id)
        assert list(errors) == [f"row-{NUM_OTHERS // 2}"]
        assert set(found) | set(errors) == {row["custom_id"] for row in rows}
        (error,) = errors.values()
        assert error["response"]["status_code"] == 500
        assert "this request was the cause, twice" in error["response"]["body"]["error"]["message"]
        await_replicas(server, 1)
    assert not list((tmp_path / "kept" / "batches" / "rows").iterdir())


NUM_STEPS: Final = 3


class SmallReplica:
    """Takes three steps for an answer. A prompt of a number below ends it at that step, with all that is under way."""

    def __init__(self, index: int) -> None:
        self.index, self.num_ends, self.outstanding, self.prefixes = index, 0, 0, KnownPrefixes(0)
        self.ready = self.is_coming_back = True
        self._under_way: dict[object, asyncio.Future[None]] = {}

    async def complete(
        self, prompt_ids: list[int], params: SamplingParams, precedence: Precedence, *, name: object
    ) -> AsyncGenerator[CompletionDelta, None]:
        async for step in self._steps(prompt_ids[0], name):
            done = Completion(0, 0, (1,) * NUM_STEPS, "", "length") if step == NUM_STEPS - 1 else None
            if done is not None or not precedence.is_background:
                yield CompletionDelta(0, 0, "", (1,), None, done)

    async def embed(self, token_ids: list[int], *, name: object) -> bytes:
        async for _ in self._steps(token_ids[0], name):
            pass
        return b"vector"

    async def _steps(self, ends_at: int, name: object) -> AsyncGenerator[int, None]:
        lost = self._under_way[name] = asyncio.get_running_loop().create_future()
        try:
            for step in range(NUM_STEPS):
                if step == ends_at and not lost.done():
                    self._end()
                await asyncio.wait((lost,), timeout=0.002)
                if lost.done():
                    await lost
                yield step
        finally:
            del self._under_way[name]

    def _end(self) -> None:
        self.ready, self.num_ends = False, self.num_ends + 1
        error = Lost(f"replica {self.index} ended", [*self._under_way])
        for each in self._under_way.values():
            if not each.done():
                each.set_exception(error)
        asyncio.get_running_loop().call_later(0.01, setattr, self, "ready", True)


async def outcomes(way: str, prompts: list[int], num_replicas: int, gap_s: float) -> tuple[list[str], int]:
    """What becomes of requests, each with a step at which it ends its replica, and the number of ends.

    Each request begins so many seconds after the one before it.
    """
    replicas: Any = [SmallReplica(index) for index in range(num_replicas)]
    service: Any = Service(replicas, None, ["model"], ServiceLimits())
    service.prompts = SimpleNamespace(embeds=way == "embed")

    async def ask(number: int, prompt: int) -> str:
        await asyncio.sleep(number * gap_s)
        encoded = Encoded([prompt], SamplingParams(max_new_tokens=NUM_STEPS))
        try:
            if way == "embed":
                return (await service.embed(encoded)).decode()
            if way == "stream":
                return str([delta async for delta in service.complete(encoded)][-1].completion is not None)
            if way == "row":
                return str(len(await service.complete_in_background(encoded, Case())))
            return str(len(await service.completions(encoded)))
        except (RequestFailed, Lost) as error:
            return type(error).__name__

    found = await asyncio.gather(*(ask(*each) for each in enumerate(prompts)))
    return found, sum(each.num_ends for each in replicas)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("way", ["whole", "row", "embed", "stream"])
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_whatever_ends_replicas_fails_and_nothing_else(way: str, num_replicas: int, data: st.DataObject) -> None:
    """One at any step, several at their first; a stream that has begun is lost with its replica.

    Each ends a replica twice, and three of them once more: a cleared request that they lost three times is suspected
    again.
    """
    num = data.draw(st.integers(1, 25))
    causes = data.draw(st.sets(st.integers(0, num - 1), max_size=3))
    last = NUM_STEPS - 1 if len(causes) == 1 else 0
    prompts = [data.draw(st.integers(0, last)) if number in causes else NUM_STEPS for number in range(num)]
    gap_s = data.draw(st.sampled_from([0.0002, 0.02]), label="a short one, or new requests come while others are tried")
    found, num_ends = asyncio.run(outcomes(way, prompts, num_replicas, gap_s))
    for number, each in enumerate(found):
        if number in causes:
            assert each in (("RequestFailed", "Lost") if way == "stream" else ("RequestFailed",))
        elif way != "stream" or each != "Lost":
            assert each not in ("RequestFailed", "Lost")
    assert num_ends <= 2 * len(causes) + (len(causes) > 2)
