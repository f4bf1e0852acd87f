"""Several API keys on one server: what one stores or asks for is nothing to the others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from jobs_support import letters_model
from openai_support import text
from serve_support import Server, serving
from test_serve_batches import begin, ended

OTHER = "another-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    (folder / "few.json").write_text('{"zinfer": {"max_sequences": 4}}')
    options = ("--files", "kept", "--config", "few.json", "--api-key", OTHER)
    with serving(model, folder, *options) as server:
        yield server


def test_files_and_batches_are_their_keys(server: Server, folder: Path, model: Path) -> None:
    own, other = server.client(), server.client(api_key=OTHER)
    name = begin(own, [text("one", max_tokens=2)])
    batch: Any = ended(own, name)
    assert batch.status == "completed"
    for file in (batch.input_file_id, batch.output_file_id):
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                ask(file)
    for look in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            look(name)
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert [list(other.files.list()), list(other.batches.list())] == [[], []]
    assert [each.id for each in own.batches.list()] == [name]
    with server.http() as http:
        shown = [http.get(f"/v1/batches/{name}").json(), http.get("/v1/files").json()["data"][0]]
    assert not any("owner" in each for each in shown)
    kept = b"".join(path.read_bytes() for path in (folder / "kept").rglob("*.json"))
    assert b'"owner": "' in kept
    assert b"a-key" not in kept
    assert OTHER.encode() not in kept


@pytest.mark.slow
def test_a_priority_does_not_shut_out_another_key(server: Server) -> None:
    own, other = server.client(), server.client(api_key=OTHER)
    urgent: Any = {"model": "letters", "prompt": "a", "max_tokens": 100}
    urgent["extra_body"] = {"priority": -5, "ignore_eos": True}
    num_answers = 0
    with ThreadPoolExecutor(60) as threads:
        calls = [threads.submit(own.completions.create, **urgent) for _ in range(60)]
        while sum(each.done() for each in calls) < 4:
            pass
        while not all(each.done() for each in calls):
            other.completions.create(model="letters", prompt="a", max_tokens=1)
            num_answers += 1
    assert num_answers > 4
