"""How batches end that wait or are out of time, and what they count until then."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs_support import letters_model
from openai_support import text
from serve_support import serving
from test_serve_batches import ENDLESS, begin, ended, num_done, rows_of

from zinfer.jobs.output import OutputFile

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
