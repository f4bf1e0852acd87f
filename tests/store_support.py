"""Shared by tests of stores: stores made in this process or by commands in child processes, folders' bytes."""

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from commands import Process, kill_group, start
from safetensors.torch import save_file
from transformers import PreTrainedModel

import zinfer.store.writing
from zinfer.config import Settings, resolve_settings
from zinfer.store.files import place_file
from zinfer.store.pipeline import StoreSummary
from zinfer.store.writing import write_store


def settings_of(device: str = "cpu", **section: object) -> Settings:
    """Settings that quantize as a `zinfer.quantization` section says; 8 bits where it says nothing."""
    return resolve_settings({"zinfer": {"device": device, "quantization": {"bits": 8} | section}})


def make_store(model: Path, output: Path, device: str = "cpu", **section: object) -> StoreSummary:
    return write_store(model, output, settings_of(device, **section))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too, but for the lock."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".zinfer_store.lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def document(folder: Path) -> dict[str, Any]:
    """The manifest as JSON."""
    value: dict[str, Any] = json.loads((folder / "zinfer_store.json").read_text())
    return value


def blocks_of(folder: Path) -> list[dict[str, Any]]:
    """The blocks that the manifest lists, with their files' names."""
    return [{"file": file, **block} for file, block in document(folder)["blocks"].items()]


def formats_of(folder: Path) -> list[dict[str, Any]]:
    """The formats that the manifest names, each once."""
    formats = (parameter["format"] for parameter in document(folder)["parameters"].values())
    return [dict(format) for format in dict.fromkeys(tuple(format.items()) for format in formats)]


def write_module(model: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint in one file under the module's own names, whatever transformers would rename."""
    folder.mkdir()
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    return folder


class Stopped(Exception):
    """What a test stops a writing with."""


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the file of this number stop the writing half way, as a killed process would leave it."""
    calls = itertools.count(1)

    def place(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        if next(calls) == number:
            path.with_name(f".zinfer_store.{path.name}.tmp").write_bytes(b"half a file")
            raise Stopped
        place_file(path, pieces)

    monkeypatch.setattr(zinfer.store.writing, "place_file", place)


def begin_store(model: Path, output: Path, number: int, **section: object) -> None:
    """Make a store up to the file of this number."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, number)
        with pytest.raises(Stopped):
            make_store(model, output, **section)


class Quantizing:
    """`zinfer quantize` from one model into one folder, in processes of its own."""

    def __init__(self, model: Path, output: Path, *options: str) -> None:
        self.model = model
        self.output = output
        self.options = options

    def start(self, *options: str, limit_bytes: int | None = None) -> Process:
        """Begin; no file that the process writes may become larger than the limit."""
        command = ["quantize", "--model", self.model, "--output", self.output, *self.options, *options]
        return start(command, Path.cwd(), warm=True, limit_bytes=limit_bytes)

    def run(self, *options: str, limit_bytes: int | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*options, limit_bytes=limit_bytes)
        out, err = process.communicate(timeout=200)
        assert process.returncode is not None
        return process.returncode, out, err

    def end(self, number: signal.Signals, when: Callable[[], bool]) -> tuple[int, str]:
        """Start, send the signal once `when` holds; returns the exit code and what stderr said."""
        process = self.start()
        while not when():
            assert process.poll() is None, process.communicate()
            time.sleep(0.0005)
        kill_group(process, number)
        said = process.communicate(timeout=100)[1]
        assert process.returncode is not None
        return process.returncode, said

    def num_finished(self) -> int:
        """Blocks that the manifest lists; -1 where there is none."""
        return len(blocks_of(self.output)) if (self.output / "zinfer_store.json").exists() else -1
