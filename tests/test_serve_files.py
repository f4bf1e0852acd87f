"""What a server stores: on the disk before it is said to be there, whole or told, within a quota and a disk's size."""

import asyncio
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from jobs_support import letters_model
from openai_support import text
from serve_support import Server, serving
from test_serve_batches import begin, ended

from zinfer.errors import ConfigError
from zinfer.serve.errors import ApiError
from zinfer.serve.file_store import FileStore

QUOTA: Final = 1 << 20


class Disk:
    """Notes what is synced and renamed, and on which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self._sync, self._rename = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.sync)
        monkeypatch.setattr(os, "replace", self.rename)

    def sync(self, descriptor: int) -> None:
        self._note("sync", Path(f"/proc/self/fd/{descriptor}").readlink())
        self._sync(descriptor)

    def rename(self, source: Any, target: Any) -> None:
        self._note("rename", Path(target))
        self._rename(source, target)

    def _note(self, what: str, path: Path) -> None:
        kind = "json" if ".json" in path.name else "folder" if path.is_dir() else "data"
        self.calls.append((what, kind))
        self.threads.add(threading.get_ident())


def test_bytes_are_on_the_disk_before_what_is_said_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no sync holds up the event loop."""
    store = FileStore(tmp_path / "files", QUOTA)
    (tmp_path / "rows").write_bytes(b"{}\n")
    disk = Disk(monkeypatch)
    data = [("sync", "data"), ("rename", "data")]
    said = [("sync", "json"), ("rename", "json"), ("sync", "folder")]
    asyncio.run(store.add(io.BytesIO(b"{}\n"), "in.jsonl", "batch"))
    assert disk.calls == [*data, ("sync", "folder"), *said]
    disk.calls.clear()
    asyncio.run(store.adopt(tmp_path / "rows", "file-1-output", "out.jsonl", "batch_output", ""))
    assert disk.calls == [*data, *said]
    assert threading.get_ident() not in disk.threads


@pytest.mark.parametrize(
    ("left", "words"), [(b"{", "is damaged: 1 of its 3 bytes are there"), (None, "are gone from the server's folder")]
)
def test_a_file_that_is_not_whole_is_told(left: bytes | None, words: str, tmp_path: Path, caplog: Any) -> None:
    store = FileStore(tmp_path, QUOTA)
    file = asyncio.run(store.add(io.BytesIO(b"{}\n"), "in.jsonl", "batch"))
    assert store.path(file.id).read_bytes() == b"{}\n"
    (tmp_path / file.id).unlink() if left is None else (tmp_path / file.id).write_bytes(left)
    for each in (store, FileStore(tmp_path, QUOTA)):
        with pytest.raises(ApiError, match=words) as caught:
            each.path(file.id)
        assert caught.value.status == 410
    assert words in caplog.text
    assert each.get(file.id).status == "error"
    each.remove(file.id)
    assert not list(tmp_path.iterdir())


def test_what_is_said_of_a_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "file-1.json").write_text("{")
    with pytest.raises(ConfigError, match=r"file-1.json is damaged .*; move it out of the folder"):
        FileStore(tmp_path, QUOTA)


def test_uploads_that_were_cut_short_are_gone(tmp_path: Path) -> None:
    for name in ("file-1", ".file-1.0a.tmp", ".file-1.json.0a.tmp"):
        (tmp_path / name).write_text("{")
    FileStore(tmp_path, QUOTA)
    assert not list(tmp_path.iterdir())


def test_files_have_a_quota(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10)
    first = asyncio.run(store.add(io.BytesIO(bytes(6)), "a", "batch"))
    with pytest.raises(ApiError, match=r"6 bytes, and 5 more are above the quota of 10 \(--file-quota"):
        asyncio.run(store.add(io.BytesIO(bytes(5)), "b", "batch"))
    assert len(list(tmp_path.iterdir())) == 2
    store.remove(first.id)
    asyncio.run(store.add(io.BytesIO(bytes(10)), "c", "batch"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    """On a disk of 60,000 bytes a file."""
    with serving(model, folder, "--files", "kept", limit_bytes=60_000) as server:
        yield server


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_bytes", [100_000, 3_000_000])
def test_a_full_disk_stores_nothing(server: Server, folder: Path, num_bytes: int) -> None:
    """The larger file is held on the disk already before it is stored."""
    before = list((folder / "kept" / "files").iterdir())
    words = r"the server's disk is full .*, and nothing was stored"
    with pytest.raises(openai.InternalServerError, match=words) as caught:
        server.client().files.create(file=("in.jsonl", io.BytesIO(bytes(num_bytes))), purpose="batch")
    assert caught.value.status_code == 507
    assert list((folder / "kept" / "files").iterdir()) == before


def test_a_stored_file_that_is_gone(server: Server, folder: Path) -> None:
    client = server.client()
    batch = ended(client, begin(client, [text("one", max_tokens=2)]))
    for name in (batch.input_file_id, batch.output_file_id):
        (folder / "kept" / "files" / name).unlink()
        with pytest.raises(openai.APIStatusError, match=f"the bytes of {name} .* are gone") as caught:
            client.files.content(name)
        assert caught.value.status_code == 410
    with pytest.raises(openai.APIStatusError, match="are gone"):
        client.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "metadata", [{str(number): "" for number in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}]
)
def test_metadata_beyond_openais_limits(server: Server, metadata: Any) -> None:
    client = server.client()
    file = client.files.create(file=("in.jsonl", io.BytesIO(b"{}\n")), purpose="batch")
    given: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match="metadata must be at most 16 pairs of texts, of 64 and 512 char"):
        client.batches.create(**given, metadata=metadata)
    most = {f"{number:064}": "v" * 512 for number in range(16)}
    assert client.batches.create(**given, metadata=most).metadata == most
