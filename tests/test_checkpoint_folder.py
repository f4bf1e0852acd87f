"""Where a model's folder is found, and what a path that is none says; nothing may reach the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from checkpoints import write_safetensors
from huggingface_hub import constants

from zinfer.errors import CheckpointError
from zinfer.weights import Checkpoint, resolve_folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection fails the test, from whatever client; being offline must not be what keeps it quiet."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail(f"the network was used: {args} {kwargs}")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"a": torch.zeros(2)})
    return folder


def cached_model(cache: Path, name: str, *revisions: str, main: str | None = None) -> Path:
    """A repository as huggingface_hub lays it out, its snapshots links into `blobs`."""
    repo = cache / f"models--{name.replace('/', '--')}"
    for revision in revisions:
        blobs = model_folder(repo / "blobs" / revision)
        snapshot = repo / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for blob in blobs.iterdir():
            (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    if main is not None:
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(main)
    return repo


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def refusal(model: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_folder(model, download=False)
    return str(caught.value)


def test_the_network_guard_bites(cache: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="the network was used"):
        huggingface_hub.snapshot_download("org/name", local_files_only=False)


def test_a_folder_by_path_text_home_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (folder, str(folder), "~/org/name", "org/name", "./org/name", "org/../org/name"):
        found = resolve_folder(model)
        assert found.is_absolute()
        assert found.samefile(folder)


def test_a_cached_repository_follows_refs_main(cache: Path) -> None:
    repo = cached_model(cache, "org/name", "aaa", "bbb", main="bbb")
    assert resolve_folder(repo) == repo / "snapshots" / "bbb"
    assert resolve_folder("org/name") == repo / "snapshots" / "bbb"
    assert resolve_folder(repo / "snapshots" / "aaa") == repo / "snapshots" / "aaa"


def test_a_hub_name_is_found_where_huggingface_hub_finds_it(cache: Path) -> None:
    cached_model(cache, "org/name", "aaa", "bbb", main="aaa")
    cached_model(cache, "gpt2", "ccc", main="ccc")
    for name in ("org/name", "gpt2"):
        config = huggingface_hub.try_to_load_from_cache(name, "config.json")
        assert isinstance(config, str)
        assert resolve_folder(name) == Path(config).parent


def test_without_refs_the_only_snapshot_counts(cache: Path) -> None:
    repo = cached_model(cache, "org/name", "aaa")
    assert resolve_folder(repo) == repo / "snapshots" / "aaa"
    cached_model(cache, "org/two", "aaa", "bbb")
    message = refusal("org/two")
    assert "no refs/main and 2 snapshots, aaa, bbb: pass one as a folder, or name@revision" in message
    assert resolve_folder("org/two@bbb").name == "bbb"


@pytest.mark.parametrize("main", ["ccc", "../../org", ""])
def test_refs_to_a_snapshot_that_is_gone(cache: Path, main: str) -> None:
    cached_model(cache, "org/name", "aaa", main=main)
    message = refusal("org/name")
    assert f"refs/main names {main!r}, which has no snapshot (it holds org/name); --no-download" in message


def test_a_cached_repository_without_snapshots(cache: Path) -> None:
    repo = cached_model(cache, "org/name", main="aaa")
    assert "without any snapshot; --no-download" in refusal("org/name")
    (repo / "refs" / "main").unlink()
    (repo / "snapshots").mkdir()
    assert "without any snapshot: run `hf download org/name`" in refusal(repo)


def test_a_name_that_is_not_cached(cache: Path) -> None:
    message = refusal("org/absent")
    assert message.startswith("'org/absent': no such folder, and not in the Hugging Face cache at ")
    assert str(cache) in message
    assert message.endswith("forbids to download it: leave that out, or run `hf download org/absent` first")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_the_environment_says_where_the_cache_is(tmp_path: Path, variable: str) -> None:
    cache = tmp_path / "place" / ("hub" if variable == "HF_HOME" else "")
    repo = cached_model(cache, "org/name", "aaa", main="aaa")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    code = "from zinfer.weights import resolve_folder; print(resolve_folder('org/name'))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {variable: str(tmp_path / "place")},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(result.stdout.strip()) == repo / "snapshots" / "aaa"


@pytest.mark.parametrize("name", ["./absent", "../absent", "~/absent", "/absent/folder", ".hidden"])
def test_a_path_that_does_not_exist(name: str) -> None:
    assert f"{name!r}: no such folder: pass the folder that holds config.json" in refusal(name)


def test_the_home_of_nobody() -> None:
    with pytest.raises(CheckpointError, match="~ names no existing user"):
        Checkpoint.listed([Path("~nobody-by-this-name/model.safetensors")], "checkpoint")
    assert "~nobody-by-this-name/model: ~ names no existing user" in refusal("~nobody-by-this-name/model")


@pytest.mark.parametrize("name", ["a/b/c", "org/", "org name", "org--name", "a..b", "org/name?", "x\0y"])
def test_neither_a_path_nor_a_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(name)
    assert "not a hub name such as org/name either" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "the model's name is empty: give its folder, or its name on the hub"),
        (" ", "the model's name is empty"),
        ("https://hf.co/a", "'https://hf.co/a': an address, and zinfer downloads from the Hugging Face hub alone"),
        ("s3://bucket/model", "'s3://bucket/model': an address, and zinfer downloads from the Hugging Face hub alone"),
        ("./org/name", "'./org/name': no such folder: pass the folder that holds config.json"),
        ("org/name-GGUF", "run `hf download org/name-GGUF --include '*Q4_K_M*'` first"),
        ("https://huggingface.co/org/name", "'org/name': no such folder, and not in the Hugging Face cache"),
    ],
)
def test_an_address_and_an_empty_name_have_their_own_words(name: str, words: str, cache: Path) -> None:
    assert words in refusal(name)


def test_the_address_of_a_page_on_the_hub_is_the_name_that_it_holds(cache: Path) -> None:
    repo = cached_model(cache, "org/name", "aaa", main="aaa")
    for end in ("", "/", "/tree/main", "/blob/main/config.json"):
        assert resolve_folder(f"https://huggingface.co/org/name{end}") == repo / "snapshots" / "aaa"


@pytest.mark.parametrize(
    ("file_name", "what"),
    [
        ("model.safetensors", "a file, not a model folder: pass the folder that holds config.json"),
        ("config.json", "a file, not a model folder"),
        ("model.Q4.gguf", "byte 0: the beginning of a GGUF file takes 8 bytes, and 0 are left in the file: the"),
        ("pytorch_model.bin", "a file, not a model folder: pass the folder that holds config.json"),
        ("consolidated.00.pth", "a file in another format"),
    ],
)
def test_a_file(tmp_path: Path, file_name: str, what: str) -> None:
    path = tmp_path / file_name
    path.touch()
    message = refusal(path)
    assert message.startswith(f"{path}: {what}")


@pytest.mark.parametrize(
    ("file_names", "what"),
    [
        ([], "an empty folder: pass the folder that holds config.json and *.safetensors"),
        (["config.json", "optimizer.bin"], "no safetensors, only optimizer.bin: convert the model, with"),
        (["pytorch_model.bin"], "no config.json beside the weights: download it from where the weights came"),
        (["consolidated.00.pth", "params.json"], "no safetensors, only consolidated.00.pth: convert the model, with"),
        (["config.json", "tokenizer.json"], "a config.json but no *.safetensors: download the weights into it"),
        (["model.safetensors"], "no config.json beside the weights: download it from where the weights came"),
        (["notes.txt"], "not a model folder, no config.json and no *.safetensors, it holds notes.txt: pass another"),
        ([f"{i}.txt" for i in range(10)], "it holds 0.txt, 1.txt, 2.txt, 3.txt, 4.txt, 5.txt, 6.txt, 7.txt and 2 more"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, file_names: list[str], what: str) -> None:
    for file_name in file_names:
        (tmp_path / file_name).touch()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: ")
    assert what in message


def test_a_snapshot_whose_config_is_a_dangling_link(cache: Path) -> None:
    repo = cached_model(cache, "org/name", "aaa", main="aaa")
    (repo / "blobs" / "aaa" / "config.json").unlink()
    assert re.search(r"no config.json \(a link to a file that is gone\) beside the weights", refusal("org/name"))


def test_an_unreadable_folder_keeps_the_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: cannot be read: Permission denied (errno 13): check the path")


def test_a_name_too_long_for_the_file_system() -> None:
    message = refusal("x" * 5000)
    assert "File name too long (errno 36)" in message
