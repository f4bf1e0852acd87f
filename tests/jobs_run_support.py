"""Shared by tests of whole jobs: a model, prompts, and engines that fail or must not be made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs_support import CHAT_TEMPLATE, ResidentEngine, letters_model, padded_by, prompt_rows, write_rows

from zinfer.jobs import JobSummary, run_job
from zinfer.jobs.request import manifest_path

_FINISHED: dict[tuple[Path, bytes], tuple[bytes, bytes]] = {}
"""Rows and manifest by the model's folder and the input's bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", prompt_rows(22))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an uninterrupted job writes for `prompts`."""
    folder = tmp_path_factory.mktemp("whole")
    finish(model, write_rows(folder / "in.jsonl", prompt_rows(22)), folder / "out.jsonl")
    return (folder / "out.jsonl").read_bytes()


def finish(model: Path, prompts: Path, output: Path) -> None:
    """Leave what an uninterrupted job leaves; for one model and input it runs once."""
    key = model, prompts.read_bytes()
    if key not in _FINISHED:
        job(model, prompts, output)
        _FINISHED[key] = output.read_bytes(), manifest_path(output).read_bytes()
    rows, manifest = _FINISHED[key]
    output.write_bytes(rows)
    manifest_path(output).write_bytes(manifest)


def job(
    model: Path, prompts: Path, output: Path, engine_factory: Callable[..., Any] | None = ResidentEngine, **options: Any
) -> JobSummary:
    with padded_by(engine_factory):
        return run_job(model, prompts, output, **{"batch_size": 4, "max_new_tokens": 8, "device": "cpu", **options})


def never_made(*_args: object, **_options: object) -> ResidentEngine:
    raise AssertionError("nothing had to be computed")


class FailingEngine(ResidentEngine):
    """Fails in its third batch."""

    error: BaseException = RuntimeError("boom")

    def generate(self, **kwargs: Any) -> Any:
        if self.calls == 2:
            raise self.error
        return super().generate(**kwargs)


def failing(error: BaseException) -> Callable[..., ResidentEngine]:
    return type("Failing", (FailingEngine,), {"error": error})
