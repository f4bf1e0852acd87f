"""A job's kernels are compiled while its weights load, and nothing else changes."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_support import run_ranks
from test_bench import LLAMA, folder_of
from threads import settled_threads

from zinfer.batching.llm import LLM
from zinfer.config import resolve_settings
from zinfer.engine.kernel_cache import are_compiled, kernels_name
from zinfer.errors import PlanError
from zinfer.jobs import rehearsal
from zinfer.jobs.bench import run_bench
from zinfer.jobs.bench_request import BenchRequest
from zinfer.jobs.job import run_job
from zinfer.jobs.rehearsal import Rehearsal
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.weights import Checkpoint

CONFIG = {"zinfer": {"device": "cpu", "kv_cache_memory": "4MB", "tokens_per_pass": 64, "max_sequences": 8}}
SETTINGS = resolve_settings(CONFIG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("letters"), num_layers=4)


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine counts as one with a GPU, and has compiled nothing."""
    count_as_gpu(tmp_path / "kernels", monkeypatch.setattr)


def count_as_gpu(kernels: Path, replace: Callable[[object, str, object], None]) -> None:
    kernels.mkdir()
    replace(triton.knobs.cache, "dir", str(kernels))
    replace(rehearsal, "_LEAST_BYTES", 0)
    replace(rehearsal, "find_limits", lambda settings: SimpleNamespace(on_cuda=settings.device != "cuda"))


def opened(model: Path, *, ends_first: bool, config: Mapping[str, object] = CONFIG) -> LLM:
    """An LLM whose rehearsal ends before the load of all layers does, or is told to end by it."""
    own = Rehearsal(model, config, {})

    @contextmanager
    def loading(parts: DeviceParts, budget: BatchingBudget) -> Iterator[None]:
        with own.beside_load(parts, budget):
            yield
            if ends_first:
                for thread in threading.enumerate():
                    if thread.name == "zinfer-rehearsal":
                        thread.join()

    return LLM(model, config, beside_load=loading)


def texts(llm: LLM) -> list[str]:
    return [each.text for each in llm.generate(["ab", "bcd", "a"], max_new_tokens=9)]


def test_texts_are_the_same_and_it_is_done_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_threads, switch_s = settled_threads(), sys.getswitchinterval()
    with LLM(model, CONFIG) as llm:
        wanted, held = texts(llm), llm.stats()
    name = kernels_name(Checkpoint.open(model), SETTINGS)
    assert not are_compiled(name)
    for _ in range(2):
        with opened(model, ends_first=True) as llm:
            assert are_compiled(name)
            assert texts(llm) == wanted
            assert llm.stats().device_bytes == held.device_bytes
    assert (settled_threads(), sys.getswitchinterval()) == (num_threads, switch_s)
    assert not caplog.records


def test_it_ends_with_the_load(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    compute = rehearsal.compute_passes

    def noted(*given: Any) -> bool:
        done.append(compute(*given))
        return done[-1]

    monkeypatch.setattr(rehearsal, "compute_passes", noted)
    with opened(model, ends_first=False):
        assert done == [False]
    assert not are_compiled(kernels_name(Checkpoint.open(model), SETTINGS))


def test_it_is_left_out_where_nothing_is_compiled_or_loading_is_quick(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = CONFIG["zinfer"]
    cases = [
        ({"device": "cuda"}, 0, False),
        ({"draft_model": str(model)}, 0, False),
        ({}, 1 << 40, False),
        ({}, 0, True),
    ]
    for changes, least_bytes, is_wanted in cases:
        monkeypatch.setattr(rehearsal, "_LEAST_BYTES", least_bytes)
        found = Rehearsal(model, {"zinfer": {**own, **changes}}, {})
        assert found._is_wanted() == is_wanted


def test_a_job_that_has_computed_passes_needs_none(model: Path, tmp_path: Path) -> None:
    name = kernels_name(Checkpoint.open(model), SETTINGS)
    rows = write_rows(tmp_path / "in.jsonl", prompt_rows(3))
    run_job(model, rows, tmp_path / "out.jsonl", config=CONFIG, device="cpu")
    assert are_compiled(name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("failure", "is_told"), [(RuntimeError("no such kernel"), True), (PlanError("tight"), False)])
def test_a_job_goes_on_without_it(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    is_told: bool,
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    rows = write_rows(tmp_path / "in.jsonl", prompt_rows(20))
    run_job(model, rows, tmp_path / "with.jsonl", config=CONFIG, device="cpu")
    for note in (tmp_path / "kernels").iterdir():
        note.unlink()
    monkeypatch.setattr(rehearsal, "compute_passes", fail)
    run_job(model, rows, tmp_path / "without.jsonl", config=CONFIG, device="cpu")
    assert (tmp_path / "without.jsonl").read_bytes() == (tmp_path / "with.jsonl").read_bytes()
    assert ("not while the weights load: no such kernel" in caplog.text) == is_told


def rehearsed(rank: int, model: Path, folder: Path, mode: str) -> tuple[bool, list[str]]:
    """Whether this rank has rehearsed, and its texts."""
    count_as_gpu(folder / str(rank), setattr)
    config = {"zinfer": {**CONFIG["zinfer"], "parallel": {mode: 2}}}
    with opened(model, ends_first=True, config=config) as llm:
        is_compiled = any((folder / str(rank)).iterdir())
        return is_compiled, texts(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "is_rehearsed"), [("zero", True), ("tensor", False)])
def test_each_rank_rehearses_alone_where_it_has_whole_layers(
    model: Path, tmp_path: Path, mode: str, is_rehearsed: bool
) -> None:
    with LLM(model, CONFIG) as llm:
        wanted = texts(llm)
    assert run_ranks(2, rehearsed, model, tmp_path, mode) == [(is_rehearsed, wanted)] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights", ["int4", "fp16"])
def test_a_job_on_random_weights_rehearses_over_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: str
) -> None:
    model = folder_of({**LLAMA, "hidden_size": 256, "intermediate_size": 256}, tmp_path)
    request = BenchRequest(model, 4, rows=3, prompt_len=8, weights=weights, device="cpu", config=CONFIG)
    done: list[bool] = []
    compute = rehearsal.compute_passes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "compute_passes", lambda llm, *_: done.append(compute(llm)) or done[-1])
        assert run_bench(request).num_new_tokens == 12
        assert run_bench(request).num_new_tokens == 12
    assert done == [True], "what was compiled is compiled once"
    assert not caplog.records
