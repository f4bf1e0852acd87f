"""How batches end that wait or are out of time, and what they count until then."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jobs_support import letters_model, letters_tokenizer
from openai_support import text
from serve_support import serving
from test_serve_batches import ENDLESS, begin, ended, num_done, rows_of

from zinfer import LLM
from zinfer.jobs.output import OutputFile
from zinfer.jobs.request import UnusableInput
from zinfer.requests.completion import Completion
from zinfer.requests.length_limits import LengthLimits
from zinfer.serve.batch_job import BatchJob
from zinfer.serve.messages import Ready
from zinfer.serve.prompts import Encoded, Prompts
from zinfer.serve.suspects import Case, Suspects

ROWS = [text(f"row-{number}", max_tokens=20 + number % 60, **ENDLESS) for number in range(400)]
SLOW_S = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


def write_slowly() -> None:
    """Let rows of this process take long to the disk."""
    append = OutputFile.append

    def slowly(out: OutputFile, rows: Sequence[Mapping[str, Any]]) -> None:
        time.sleep(SLOW_S)
        append(out, rows)

    OutputFile.append = slowly  # type: ignore[method-assign]


def test_a_batch_that_waits_is_cancelled_at_once(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--files", "kept") as server:
        client = server.client()
        first = begin(client, ROWS)
        queued = begin(client, [text("one")])
        assert client.batches.cancel(queued).status == "cancelling"
        assert ended(client, queued).status == "cancelled"
        assert client.batches.retrieve(first).status in ("validating", "in_progress")
        client.batches.cancel(first)


@pytest.mark.slow
def test_counts_do_not_fall_and_what_is_late_is_told(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--files", "kept", prepare=(write_slowly, ())) as server:
        client = server.client()
        name, queued = begin(client, ROWS), begin(client, ROWS[:3])
        while num_done(client, [name]) == 0:
            time.sleep(0.02)
        time.sleep(SLOW_S / 2)
        before = client.batches.retrieve(name).request_counts
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=30)
    for each in (name, queued):
        path = tmp_path / "kept" / "batches" / f"{each}.json"
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({**kept, "expires_at": int(time.time()) - 1}))
    with serving(model, tmp_path, "--files", "kept", prepare=(write_slowly, ())) as server:
        client = server.client()
        counts = client.batches.retrieve(name).request_counts
        assert before.total == counts.total == len(ROWS)
        assert 0 < before.completed <= counts.completed
        for each, rows in ((queued, ROWS[:3]), (name, ROWS)):
            batch: Any = ended(client, each)
            assert batch.status == "expired"
            assert batch.request_counts.total == len(rows)
            done = {} if batch.output_file_id is None else rows_of(client, batch.output_file_id)
            late = rows_of(client, batch.error_file_id)
            assert len(done) == batch.request_counts.completed
            assert set(late) == {row["custom_id"] for row in rows} - set(done)
            assert late
            for row in late.values():
                assert (row["response"], row["error"]["code"]) == (None, "batch_expired")


class OneAnswer:
    """A service that answers the row of one token, and others only if it is told to."""

    names = ("letters",)

    def __init__(self, row_settings: dict[str, str], *, answers_all: bool) -> None:
        self.tokenizer, self.suspects, self._answers_all = letters_tokenizer(), Suspects(), answers_all
        self.prompts = Prompts(self.tokenizer, 2048)
        self.prompts.open(Ready(131, LengthLimits(), 128, row_settings=row_settings))

    def check_model(self, name: str | None) -> str:
        return self.names[0]

    async def complete_in_background(self, encoded: Encoded, case: Case) -> list[Completion]:
        while len(encoded.prompt_ids) > 1 and not self._answers_all:
            await asyncio.sleep(0.01)
        return [Completion(0, 0, "a", (40,), "length")]


def test_a_batch_goes_on_under_its_own_rule_alone(tmp_path: Path) -> None:
    rows = [text("short", prompt="a"), text("long", prompt="aa")]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))

    async def run(row_settings: dict[str, str], *, answers_all: bool) -> bool:
        service: Any = OneAnswer(row_settings, answers_all=answers_all)
        began = datetime.fromtimestamp(0).astimezone()
        job = BatchJob(service, tmp_path / "in.jsonl", tmp_path / "rows.jsonl", "/v1/completions", began)
        working = asyncio.create_task(asyncio.to_thread(job.run, asyncio.get_running_loop()))
        while not answers_all and not job.counts["completed"]:
            await asyncio.sleep(0.01)
        if not answers_all:
            job.stop()
        try:
            return await working
        finally:
            service.prompts.close()

    rule = {"generation_config": '{"repetition_penalty": 1.5}'}
    assert not asyncio.run(run(rule, answers_all=False))
    with pytest.raises(UnusableInput) as caught:
        asyncio.run(run({}, answers_all=True))
    assert str(caught.value).startswith("the server was started with other settings than the batch was begun with: ")
    assert 'settings.generation_config: {"repetition_penalty": 1.5} in the manifest, absent now' in str(caught.value)
    assert len((tmp_path / "rows.jsonl").read_bytes().splitlines()) == 1
    assert asyncio.run(run(rule, answers_all=True))
    found = [json.loads(line)["custom_id"] for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert found == ["short", "long"]


def test_what_changes_rows_is_said_to_the_server(tmp_path: Path) -> None:
    model = letters_model(tmp_path / "letters")
    (model / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.5, "do_sample": True}))
    with LLM(model, device="cpu", kv_cache_memory="1MB", kv_cache_dtype="int8", dtype="bfloat16") as llm:
        assert llm.row_settings == {
            "dtype": "bfloat16",
            "kv_cache_dtype": "int8",
            "generation_config": '{"repetition_penalty": 1.5}',
        }
    with LLM(model, device="cpu", kv_cache_memory="1MB", generation_config="none") as llm:
        assert llm.row_settings == {}
