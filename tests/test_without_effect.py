"""Keys that change nothing are said, with the reason, by whatever takes a configuration: once for each engine."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import job, model, output, prompts
from llm_support import folder

import zinfer
from zinfer import LLM
from zinfer.config import resolve_settings
from zinfer.engine.engine import InferenceEngine
from zinfer.jobs.bench import run_bench
from zinfer.jobs.bench_request import BenchRequest
from zinfer.planning.job_plan import Job

__all__ = ["folder", "model", "output", "prompts"]  # fixtures

CONFIG = {"train_batch_size": 4, "steps_per_print": 9, "zinfer": {"device": "cpu", "kv_cache_memory": "1MB"}}


def make_engine(folder: Path) -> None:
    zinfer.init_inference(folder, CONFIG).destroy()


def make_by_initialize(folder: Path) -> None:
    zinfer.initialize(model=folder, config=CONFIG)[0].destroy()


def make_llm(folder: Path) -> None:
    LLM(folder, CONFIG).close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [make_engine, make_by_initialize, make_llm])
def test_each_key_once_for_each_engine(
    folder: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    make(folder)
    wanted = [f"without effect: {each.path} ({each.reason})" for each in resolve_settings(CONFIG).without_effect]
    assert len(wanted) == 2
    assert said(caplog) == wanted
    assert {record.levelno for record in caplog.records if record.getMessage() in wanted} == {logging.WARNING}
    make(folder)
    assert said(caplog) == wanted * 2


@pytest.mark.slow
def test_arguments_of_initialize_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    zinfer.initialize(model=folder, config={}, device="cpu", dist_init_required=False)[0].destroy()
    assert said(caplog) == [
        "without effect: dist_init_required (says how several GPUs find each other; zinfer has its own way)"
    ]


def test_nothing_where_all_is_honoured(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    zinfer.init_inference(folder, device="cpu", dtype="fp32").destroy()
    assert said(caplog) == []


def test_an_llm_keeps_sequences_under_a_path_where_an_engine_writes_nothing(
    folder: Path, model: Path, prompts: Path, output: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = {"zero_optimization": {"offload_param": {"nvme_path": str(tmp_path / "parked")}}}
    LLM(folder, config, device="cpu", kv_cache_memory="1MB").close()
    assert said(caplog) == []
    assert not [note for note in job(model, prompts, output, config=config).notes if "without effect" in note]
    zinfer.init_inference(folder, config, device="cpu").destroy()
    assert [line.partition(" (")[0] for line in said(caplog)] == [
        "without effect: zero_optimization.offload_param.nvme_path"
    ]


def test_what_a_plan_honours_is_not_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast = {"zinfer": {"device": "cpu", "kv_cache_memory": "1MB", "optimize": "speed"}}
    LLM(folder, fast, job=Job(1, [3], [2])).close()
    assert said(caplog) == []
    run_bench(BenchRequest(str(folder), new_tokens=2, rows=1, prompt_len=3, config=fast))
    assert said(caplog) == []
    LLM(folder, fast).close()
    assert [line.partition(" (")[0] for line in said(caplog)] == ["without effect: zinfer.optimize"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"engine_factory": None},
        {"engine_factory": InferenceEngine},
        {"task": "embed", "max_new_tokens": None, "engine_factory": None},
    ],
)
def test_a_job_says_it_where_it_tells_of_itself(
    model: Path, prompts: Path, output: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    notes = job(model, prompts, output, config={"train_batch_size": 4}, **options).notes
    assert len([note for note in notes if "without effect: train_batch_size (" in note]) == 1
    assert said(caplog) == []
    LLM(model, CONFIG).close()
    assert len(said(caplog)) == 2, "the job's silence ended with it"
