"""Files and batches over a server: what comes back and what ends them; a killed server loses and doubles no row."""

import io
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from commands import start
from guide_blocks import GUIDE, blocks_of
from jobs_support import letters_model
from openai_support import HI, chat, text
from serve_support import Server, serving

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENDLESS = {"ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    with serving(model, folder, "--files", "kept", "--max-file", "1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def begin(client: openai.OpenAI, rows: Sequence[dict[str, Any] | bytes], endpoint: Any = "/v1/completions") -> str:
    """Begin a batch of rows, of which those of bytes stand in the file as they are."""
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert file.bytes == len(data)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h").id


def ended(client: openai.OpenAI, name: str) -> Any:
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(name)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return batch


def rows_of(client: openai.OpenAI, name: str | None) -> dict[str, dict[str, Any]]:
    assert name is not None
    rows = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_batch_gives_each_row_its_answer(client: openai.OpenAI) -> None:
    rows = [text(f"row-{number}", prompt="ab" * (number + 1), max_tokens=6, temperature=0) for number in range(20)]
    batch = ended(client, begin(client, [*rows, text("bad", prompt="a", temperature=-1)]))
    assert batch.status == "completed", batch.errors
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (21, 20, 1)
    found, errors = rows_of(client, batch.output_file_id), rows_of(client, batch.error_file_id)
    assert errors["bad"]["response"]["status_code"] == 400
    for row in rows:
        answer = client.completions.create(**{**row["body"], "model": "letters"})
        assert found[row["custom_id"]]["response"]["body"]["choices"][0]["text"] == answer.choices[0].text
    names = [each.id for each in client.files.list(purpose="batch_output")]
    assert {batch.output_file_id, batch.error_file_id} <= set(names)
    assert client.files.delete(names[0]).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(names[0])


def test_rows_for_another_model_get_what_the_routes_answer(client: openai.OpenAI) -> None:
    models = {"none": {}, "own": {"model": "letters"}, "other": {"model": "nope"}, "empty": {"model": ""}}
    rows = [text(name, max_tokens=2, **named) for name, named in models.items()]
    batch = ended(client, begin(client, [*rows, text("bad", model="nope", temperature=-1)]))
    assert batch.status == "completed", batch.errors
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 2, 3)
    found, errors = rows_of(client, batch.output_file_id), rows_of(client, batch.error_file_id)
    assert {name: row["response"]["body"]["model"] for name, row in found.items()} == dict.fromkeys(
        ("none", "own"), "letters"
    )
    assert errors.pop("bad")["response"]["status_code"] == 400
    for line, name in ((3, "other"), (4, "empty")):
        with pytest.raises(openai.NotFoundError) as refused:
            client.completions.create(model=models[name]["model"], prompt="a")
        response = errors.pop(name)["response"]
        assert response["status_code"] == refused.value.status_code == 404
        error: Any = refused.value.body
        assert error["message"] == f"model {models[name]['model']!r} does not exist here; use 'letters'"
        assert response["body"]["error"] == {**error, "message": f"line {line}: {error['message']}"}
    assert not errors


def test_the_guides_batch(
    client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (each for each in blocks_of(GUIDE / "serve.md") if "batches.create" in each.text)
    (tmp_path / "batch.jsonl").write_text(json.dumps(text("one", max_tokens=2)))
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text.replace("sleep(1)", "sleep(0.1)"), "serve.md", "exec"), {"client": client})
    assert json.loads(capsys.readouterr().out)["custom_id"] == "one"


@pytest.mark.slow
def test_chats_are_answered_while_a_batch_runs(server: Server, client: openai.OpenAI) -> None:
    rows = [text(f"row-{number}", prompt="ab" * 20, max_tokens=20 + number % 60, **ENDLESS) for number in range(600)]
    name = begin(client, rows)
    while client.batches.retrieve(name).request_counts.completed == 0:
        time.sleep(0.05)
    answer = client.chat.completions.create(model="letters", messages=HI, max_tokens=20, extra_body=ENDLESS)
    batch = client.batches.retrieve(name)
    assert batch.status == "in_progress", "the chat did not wait for the batch"
    with server.http() as http:
        metrics = http.get("/metrics").text
    assert 'zinfer:batch_rows{model_name="letters",state="total"} 600.0' in metrics
    assert 'zinfer:unfinished_batches{model_name="letters"} 1.0' in metrics
    (replica,) = server.load()["replicas"]  # type: ignore[misc]
    assert 0 < replica["background_sequences"] <= 600
    assert replica["waiting_sequences"] == 0
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert client.batches.cancel(name).status == "cancelling"
    batch = ended(client, name)
    assert batch.status == "cancelled"
    assert len(rows_of(client, batch.output_file_id)) == batch.request_counts.completed < 600
    with pytest.raises(openai.BadRequestError, match="is cancelled and cannot be"):
        client.batches.cancel(name)


@pytest.mark.parametrize(
    ("rows", "line", "words"),
    [
        ([], None, "input FILE holds no row; give one JSON object a line"),
        ([{"id": 1, "prompt": "a"}], 1, "line 1: there is no custom_id"),
        ([text("a"), {**text("b"), "custom_id": 5}], 2, "line 2: custom_id must be a string, not 5"),
        ([text("a"), b'"b"'], 2, "line 2: not a JSON object but 'b'"),
        ([text("a"), b"b"], 2, "line 2: not JSON: Expecting value at column 1"),
        ([text("a"), chat("b")], 2, "line 2: its url is '/v1/chat/completions', and the batch's is '/v1/completions'"),
        ([{**text("a"), "url": None}], 1, "line 1: its url is None, and the batch's is '/v1/completions'"),
        (
            [text("a"), text("b"), text("c"), text("b"), text("a")],
            4,
            "input FILE: every row needs an id of its own; lines 2 and 4 both have the custom_id 'b'; "
            "lines 1 and 5 both have the custom_id 'a'",
        ),
    ],
)
def test_inputs_that_are_no_batch_fail(
    client: openai.OpenAI, rows: list[dict[str, Any] | bytes], line: int | None, words: str
) -> None:
    batch = ended(client, begin(client, rows))
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert error.message == words.replace("FILE", batch.input_file_id)
    assert error.line == line


def test_other_faults_fail_only_their_row(client: openai.OpenAI) -> None:
    faults = [
        text("field", temperture=1),
        {**text("method"), "method": "GET"},
        {**text("beside"), "priority": 1},
        text("long", prompt="a" * 100_000),
        text("words", bad_words=["a"] * 2000),
        text("pattern", structured_outputs={"regex": "("}),
    ]
    batch = ended(client, begin(client, [*faults, text("good")]))
    assert batch.status == "completed", batch.errors
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 6)
    errors = rows_of(client, batch.error_file_id)
    assert set(errors) == {row["custom_id"] for row in faults}
    assert {row["response"]["status_code"] for row in errors.values()} == {400}


def test_failures_of_the_disk_tell_no_folders(client: openai.OpenAI, folder: Path) -> None:
    rows = folder / "kept" / "batches" / "rows"
    rows.rename(rows.with_name("away"))
    batch = ended(client, begin(client, [text("a")]))
    rows.with_name("away").rename(rows)
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert error.message.startswith(f"output {batch.id}.jsonl cannot be written: No such file or directory (errno 2)")
    assert error.line is None


def test_what_cannot_be_stored_or_begun_is_refused(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="413"):
        client.files.create(file=("in.jsonl", b"a" * (2 << 20)), purpose="batch")
    file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch").id
    assert client.files.content(file).content == b"{}"
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        client.batches.create(input_file_id=file, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window must be '24h'"):
        client.batches.create(
            input_file_id=file,
            endpoint="/v1/completions",
            completion_window="1h",  # type: ignore[arg-type]
        )
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.batches.create(input_file_id="../batches", endpoint="/v1/completions", completion_window="24h")
    with server.http() as http:
        for path in ("/v1/files/..%2f..%2fmodel", "/v1/batches/nothing", "/v1/files?limit=0", "/v1/files?after=x"):
            assert 400 <= http.get(path).status_code < 500


def lines_of(client: openai.OpenAI, name: str) -> list[bytes]:
    """The lines of a batch's output, sorted, without the time when the batch began."""
    batch = ended(client, name)
    assert batch.status == "completed", batch.errors
    content = client.files.content(batch.output_file_id).content
    return sorted(re.sub(rb'"created":\d+', b'"created":0', line) for line in content.splitlines())


def num_done(client: openai.OpenAI, names: list[str]) -> int:
    return sum(client.batches.retrieve(name).request_counts.completed for name in names)


def refusal(model: Path, folder: Path, files: str) -> str:
    """What a server says that may not use the folder of files, and ends with exit code 2."""
    process = start(["serve", "--model", model, "--device", "cpu", "--port", "0", "--files", files], folder, warm=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    return said


USED = "zinfer: error: --files {} is used by another server; give another --files, or end that server\n"


@pytest.mark.slow
def test_a_folder_of_files_is_one_servers(model: Path, tmp_path: Path) -> None:
    """Also for a server that is killed; its replicas share the folder."""
    (tmp_path / "link").symlink_to("kept")
    rows = [text(f"row-{number}", max_tokens=20, **ENDLESS) for number in range(100)]
    with serving(model, tmp_path, "--files", "kept", "--replicas", "2") as server:
        name = begin(server.client(), rows)
        for files in ("kept", "link"):
            assert refusal(model, tmp_path, files) == USED.format(files)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=30)
    with serving(model, tmp_path, "--files", "kept") as server:
        assert len(lines_of(server.client(), name)) == 100
    with serving(model, tmp_path, "--files", "kept") as server:
        assert server.client().batches.retrieve(name).status == "completed"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("README.md", "--files README.md is not a folder; give another --files"),
        ("README.md/kept", "--files README.md/kept cannot be used: Not a directory (errno 20); give another --files, "),
        ("nowhere", "--files nowhere cannot be used: File exists (errno 17); give another --files, "),
    ],
)
def test_what_is_no_folder_of_files_is_refused(model: Path, tmp_path: Path, files: str, words: str) -> None:
    (tmp_path / "README.md").touch()
    (tmp_path / "nowhere").symlink_to("missing/folder")
    said = refusal(model, tmp_path, files)
    assert said.startswith(f"zinfer: error: {words}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("num_kills", [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_killed_server_goes_on_with_its_batches(model: Path, tmp_path: Path, num_kills: int) -> None:
    """All rows are there once, and their bytes are those of batches that nobody disturbed."""
    num_kills, num_cut, draw = int(os.environ.get("ZINFER_KILLS", num_kills)), 0, random.Random(num_kills)
    several = [
        [text(f"{kind}-{number}", prompt=f"a{number}", max_tokens=1 + number % 50, **ENDLESS) for number in range(num)]
        for kind, num in (("row", 150), ("other", 50))
    ]
    for rows in several:
        rows.insert(0, text("refused", model="nope"))  # its error is read again
    wanted, pairs = list[list[bytes]](), list[list[str]]()
    for _ in range(num_kills):
        with serving(model, tmp_path, "--files", "kept") as server:
            client = server.client()
            if not wanted:
                wanted = [lines_of(client, begin(client, rows)) for rows in several]
                assert [len(each) for each in wanted] == [150, 50]
            if not pairs or all(client.batches.retrieve(name).status == "completed" for name in pairs[-1]):
                pairs.append([begin(client, rows) for rows in several])
            most = min(180, num_done(client, pairs[-1]) + draw.randrange(1, 30))
            while num_done(client, pairs[-1]) < most:
                time.sleep(0.01)
            num_cut += client.batches.retrieve(pairs[-1][1]).status != "completed"
            replicas = server.replica_ids()
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(timeout=30)
    with serving(model, tmp_path, "--files", "kept") as server:
        assert refusal(model, tmp_path, "kept") == USED.format("kept")
        client = server.client()
        for pair in pairs:
            assert [lines_of(client, name) for name in pair] == wanted
    print(num_kills, "kills", num_cut, "of them within", len(pairs), "pairs of batches")
    assert num_cut > num_kills / 2
    assert not any(Path(f"/proc/{each}").exists() for each in replicas)
