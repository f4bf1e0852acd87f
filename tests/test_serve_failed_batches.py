"""Batches that cannot go on: their inputs stay, and the rows that they have computed are handed out."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from jobs_support import letters_model
from openai_support import text
from serve_support import serving
from test_serve_batches import ENDLESS, begin, ended, num_done, rows_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


def check_failed(client: openai.OpenAI, name: str, num_rows: int, words: str) -> None:
    """Check that a batch has failed, with an output file of some of its rows that are counted."""
    batch: Any = ended(client, name)
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert words in error.message
    assert "kept" not in error.message, "no folders"
    counts = batch.request_counts
    assert 0 < counts.completed == len(rows_of(client, batch.output_file_id)) < num_rows
    assert counts.failed == len(rows_of(client, batch.error_file_id)) == 1
    assert counts.total in (num_rows, counts.completed + counts.failed)


def test_rows_outlive_the_input_of_their_batch(model: Path, tmp_path: Path) -> None:
    rows = [text("bad", model="nope")]
    rows += [text(f"row-{number}", max_tokens=20 + number % 60, **ENDLESS) for number in range(400)]
    with serving(model, tmp_path, "--files", "kept") as server:
        client = server.client()
        name = begin(client, rows)
        queued = begin(client, rows)
        while num_done(client, [name]) < 20:
            time.sleep(0.02)
        file = client.batches.retrieve(name).input_file_id
        with pytest.raises(openai.ConflictError, match=f"the file {file} is in use; wait for batch {name}, which is"):
            client.files.delete(file)
        unread = client.batches.retrieve(queued).input_file_id
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=30)
    for each in (file, unread):
        for path in (tmp_path / "kept" / "files").glob(f"{each}*"):
            path.unlink()
    with serving(model, tmp_path, "--files", "kept") as server:
        client = server.client()
        check_failed(client, name, len(rows), f"the input {file} was deleted before it was computed; upload it again")
        batch: Any = ended(client, queued)
        assert (batch.status, batch.output_file_id) == ("failed", None)
        assert client.files.delete(client.batches.retrieve(name).output_file_id or "").deleted


@pytest.mark.slow
def test_a_full_disk_ends_a_batch_and_not_its_rows(model: Path, tmp_path: Path) -> None:
    """The next batch is computed."""
    rows = [text("bad", model="nope")]
    rows += [text(f"row-{number}", prompt="a", max_tokens=90, **ENDLESS) for number in range(250)]
    with serving(model, tmp_path, "--files", "kept", limit_bytes=60_000) as server:
        client = server.client()
        check_failed(client, begin(client, rows), len(rows), "cannot be written: File too large")
        assert ended(client, begin(client, rows[1:9])).status == "completed"
