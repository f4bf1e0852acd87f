"""`zinfer bench --compare`: rivals run on a real checkpoint in processes of their own; one that cannot is no error."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks_support import run_ranks
from test_bench import GPT_OSS, LLAMA, MIXTRAL, check_refused, folder_of, zinfer_bench

from zinfer.errors import ConfigError, PlanError
from zinfer.jobs import comparison
from zinfer.jobs.bench import BenchRequest, run_bench
from zinfer.jobs.bench_result import BenchResult
from zinfer.jobs.bench_summary import _rival
from zinfer.jobs.comparison import Compared, check_room, compare
from zinfer.jobs.limited_process import STOPPED
from zinfer.jobs.rival_worker import _rows_of
from zinfer.jobs.rivals import Task, chosen_rivals
from zinfer.model.built_outline import made_up_model
from zinfer.weights import Checkpoint

STAND_IN = """
import os
import types
import torch
import transformers.integrations

assert os.environ["DS_ACCELERATOR"] == "cpu"

class Settings:
    def __init__(self, settings):
        assert settings["zero_optimization"]["stage"] == 3

transformers.integrations.HfDeepSpeedConfig = Settings

def init_distributed(backend):
    torch.distributed.init_process_group(backend)

def initialize(model, config):
    assert torch.distributed.get_backend() == "gloo"
    assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"]) == NUM_RANKS
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False}
    return (types.SimpleNamespace(module=model),)
"""
FAILING = 'raise RuntimeError("this machine has no compiler")'


@pytest.fixture(autouse=True)
def no_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No findings of an earlier probe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stand_in_for_deepspeed(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, here and in the processes that are started."""
    package = tmp_path / "packages" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(script)
    use_packages(package.parent, monkeypatch)


def use_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import from a folder first, here and in the processes that are started."""
    monkeypatch.syspath_prepend(str(folder))
    root = Path(__file__).resolve().parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")


def request_for(model: str, *rivals: str, rows: int = 2) -> BenchRequest:
    return BenchRequest(model=model, rows=rows, prompt_len=4, new_tokens=2, device="cpu", compare=rivals)


def task_of(scratch: Path, rival: str = "", num_prompts: int = 8, num_ranks: int = 1) -> Task:
    """Prompts of one token, their numbers."""
    return Task(
        rival=rival,
        checkpoint="",
        scratch=str(scratch),
        prompts=[[number] for number in range(num_prompts)],
        new_tokens=3,
        batch_size=256,
        device="cpu",
        device_bytes=None,
        num_ranks=num_ranks,
        result="",
    )


Ending = Callable[[Task], str | None]


def run_by(
    ending: Ending, folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1
) -> tuple[Compared, list[int]]:
    """What is found of a rival whose process does and ends as told, and the batch sizes that it was given."""
    given: list[int] = []

    def run_limited(command: Sequence[str], log: Path, limit_s: float) -> str | None:
        task = Task(**json.loads(Path(command[-1]).read_text()))
        given.append(task.batch_size)
        return ending(task)

    monkeypatch.setattr(comparison, "is_installed", lambda name: True)
    monkeypatch.setattr(comparison, "run_limited", run_limited)
    folder.mkdir()
    _, outline = made_up_model(Path(folder_of(LLAMA, folder)))
    [found] = compare(["deepspeed"], task_of(folder, num_ranks=num_ranks), outline, 24.0)
    return found, given


def tell(task: Task, num_done: int) -> None:
    Path(task.result).write_text(json.dumps({"start_s": 1.0, "job_s": 2.0, "num_done": num_done}))


def test_batches_are_halved_until_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(task: Task) -> str | None:
        if task.batch_size > 2:
            return "exit code 1: torch.OutOfMemoryError: CUDA out of memory."
        tell(task, 8)
        return None

    found, given = run_by(ending, tmp_path / "first", monkeypatch)
    assert given == [8, 4, 2]
    assert found == Compared("deepspeed", 12.0, 2.0, 1.0, 2, 8)
    found, given = run_by(lambda task: "exit code 1: OutOfMemoryError", tmp_path / "second", monkeypatch, num_ranks=2)
    assert given == [4, 2, 1], "each rank has half of the prompts"
    assert found.failure == "exit code 1: OutOfMemoryError"


def test_a_rival_at_its_limit_counts_with_what_it_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(task: Task) -> str:
        tell(task, 4)
        return f"{STOPPED}3600 s, after: it printed nothing"

    found, _ = run_by(ending, tmp_path / "first", monkeypatch)
    assert found == Compared("deepspeed", 6.0, 4.0, 1.0, 8, 4)
    assert _rival(found, 8).startswith("6.0 tokens/s over 4 of the rows after 1 s, in batches of 8; zinfer is 4.00 x")
    found, _ = run_by(lambda task: f"{STOPPED}3600 s, after: loading", tmp_path / "second", monkeypatch)
    assert found.failure == f"{STOPPED}3600 s, after: loading"
    assert found.tokens_per_s == 0


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 6])
def test_ranks_of_a_rival_take_equal_steps_through_all_prompts(num_prompts: int, tmp_path: Path) -> None:
    task = task_of(tmp_path, "deepspeed", num_prompts, 3)
    rows = [_rows_of(rank, task) for rank in range(3)]
    assert len({len(each) for each in rows}) == 1
    assert {row[0] for each in rows for row in each} == set(range(num_prompts))
    assert _rows_of(0, task_of(tmp_path, "accelerate", num_prompts, 3)) == task.prompts, "in one process"


def benched(rank: int, model: str, folder: Path) -> BenchResult:
    """Benches in a process that a server forks, whose environment may be older than the test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        use_packages(folder / "packages", patch)
        return run_bench(request_for(model, "accelerate", "deepspeed", rows=5))


@pytest.mark.slow
def test_rivals_get_as_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_deepspeed(f"NUM_RANKS = 2\n{STAND_IN}", tmp_path, monkeypatch)
    first, second = run_ranks(2, benched, folder_of(LLAMA, tmp_path), tmp_path)
    assert second.compared == (), "the first rank compares"
    for each, batch_size in zip(first.compared, (5, 3), strict=True):
        assert each.failure == ""
        assert (each.num_done, each.batch_size) == (5, batch_size)
        assert each.ratio == pytest.approx(first.tokens_per_s / each.tokens_per_s)


@pytest.mark.slow
def test_both_rivals_complete_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_deepspeed(f"NUM_RANKS = 1\n{STAND_IN}", tmp_path, monkeypatch)
    found = run_bench(request_for(folder_of(LLAMA, tmp_path), "accelerate", "deepspeed"))
    assert [each.rival for each in found.compared] == ["accelerate", "deepspeed"]
    for each in found.compared:
        assert each.failure == ""
        assert each.tokens_per_s > 0
        assert each.ratio == pytest.approx(found.tokens_per_s / each.tokens_per_s)


@pytest.mark.parametrize("config", [MIXTRAL, GPT_OSS])
def test_a_written_checkpoint_is_a_whole_model(config: dict[str, object], tmp_path: Path) -> None:
    _, outline = made_up_model(Path(folder_of(config, tmp_path)))
    with comparison._checkpoint(outline, tmp_path) as folder:
        written = Checkpoint.open(folder)
        assert {name: entry.shape for name, entry in written.tensors.items()} == {
            name: entry.shape for name, entry in outline.tensors.items()
        }
    assert not folder.exists()


def compared(*rivals: str, tmp_path: Path) -> tuple[list[dict[str, Any]], str]:
    """What the command says of rivals: as JSON, and in all."""
    options = ("--rows", "1", "--prompt-len", "4", "--new-tokens", "1", "--compare", ",".join(rivals))
    found = zinfer_bench("--model", folder_of(LLAMA, tmp_path), *options)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.splitlines()[-1])["compared"], found.stdout


@pytest.mark.slow
def test_a_rival_that_fails_is_said_beside_one_that_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_deepspeed(FAILING, tmp_path, monkeypatch)
    (accelerate, deepspeed), _ = compared("accelerate", "deepspeed", tmp_path=tmp_path)
    assert accelerate["failure"] == ""
    assert accelerate["tokens_per_s"] > 0
    assert deepspeed["failure"] == "exit code 1: RuntimeError: this machine has no compiler"
    assert deepspeed["tokens_per_s"] == 0


def test_a_rival_that_is_absent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_installed", lambda name: False)
    several, said = compared("accelerate", "deepspeed", tmp_path=tmp_path)
    for each in several:
        assert each["failure"] == "not installed"
        assert each["tokens_per_s"] == 0
    assert "no figures: not installed" in said


def test_a_checkpoint_without_room_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**11, 0, 10**11))
    refused = zinfer_bench("--model", "deepseek-v3", "--rows", "1", "--compare", "accelerate")
    check_refused(refused, "--compare needs a real checkpoint of 1.34 TB; ")
    _, outline = made_up_model(Path(folder_of(LLAMA, tmp_path)))
    check_room(outline, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**15, 0, 10**15))
    monkeypatch.setattr(comparison, "free_host_bytes", lambda: 10**6)
    with pytest.raises(PlanError, match=r"rivals keep the weights in host memory, \d+\.\d+ MB of it, and 1.00 MB are"):
        check_room(outline, tmp_path)


def test_names_of_rivals() -> None:
    assert chosen_rivals("") == ()
    assert chosen_rivals("deepspeed, accelerate") == ("deepspeed", "accelerate")
    with pytest.raises(ConfigError, match="no rival is called 'vllm'; known ones: accelerate, deepspeed"):
        chosen_rivals("vllm")
