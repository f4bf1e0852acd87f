"""The batch job in one process: what it writes, what it refuses, and that it goes on where it stopped."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_support import CHAT_TEMPLATE, ResidentEngine, letters_model, prompt_rows, read_rows, write_rows

from zinfer.errors import CheckpointError, ConfigError, JobError
from zinfer.jobs import JobSummary, UnusableInput, run_job
from zinfer.jobs.batches import fitting_parts
from zinfer.jobs.manifest import manifest_path
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import Row
from zinfer.nvme.reader import DiskReadError
from zinfer.offload.stats import RunStats


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
    job(model, write_rows(folder / "in.jsonl", prompt_rows(22)), folder / "out.jsonl")
    return (folder / "out.jsonl").read_bytes()


def job(model: Path, prompts: Path, output: Path, **options: Any) -> JobSummary:
    options = {"batch_size": 4, "max_new_tokens": 8, "engine_factory": ResidentEngine, "device": "cpu", **options}
    return run_job(model, prompts, output, **options)


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


def test_every_row_is_done_once_and_in_order(model: Path, prompts: Path, output: Path) -> None:
    summary = job(model, prompts, output)
    rows = read_rows(output)
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(22)]
    assert list(rows[0]) == ["id", "text", "token_ids", "num_prompt_tokens", "num_output_tokens", "finish_reason"]
    assert [row["num_prompt_tokens"] for row in rows] == [1 + number % 17 for number in range(22)]
    assert all(row["num_output_tokens"] == len(row["token_ids"]) <= 4 + number % 9 for number, row in enumerate(rows))
    assert (summary.num_rows, summary.num_done, summary.num_failed, summary.num_skipped) == (22, 22, 0, 0)
    assert summary.num_output_tokens == sum(row["num_output_tokens"] for row in rows)
    assert summary.stats == RunStats(passes=6)
    assert summary.exit_code == 0
    assert len({token for row in rows for token in row["token_ids"]}) >= 6


def test_bad_lines_become_error_rows_and_the_job_goes_on(model: Path, tmp_path: Path, output: Path) -> None:
    lines: list[dict[str, Any] | str | bytes] = [
        {"id": "good", "prompt": "abc"},
        "{broken",
        {"id": "typo", "prompt": "abc", "temperture": 1},
        b'{"prompt": "\xff"}',
        {"id": "long", "prompt": "a" * 127, "max_new_tokens": 2},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "tool", "messages": [{"role": "tool", "content": "hi"}]},
    ]
    summary = job(model, write_rows(tmp_path / "in.jsonl", lines), output)
    rows = {row["id"]: row for row in read_rows(output)}
    assert list(rows) == ["good", 2, "typo", 4, "long", "chat", "tool"]
    assert [row_id for row_id, row in rows.items() if "error" not in row] == ["good", "chat"]
    assert rows[2]["error"].startswith("line 2: not JSON")
    assert "line 3: unknown field 'temperture'; did you mean 'temperature'?" in rows["typo"]["error"]
    assert "line 4: not UTF-8" in rows[4]["error"]
    assert "127 tokens and 2 new ones are more than 128" in rows["long"]["error"]
    assert rows["chat"]["num_prompt_tokens"] == len("user:hi;reply:")
    assert (summary.num_done, summary.num_failed, summary.exit_code) == (2, 5, 3)


def test_a_finished_job_needs_no_engine(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    job(model, prompts, output)
    summary = job(model, prompts, output, engine_factory=never_made)
    assert (summary.num_done, summary.num_skipped, summary.num_output_tokens) == (22, 22, 0)
    assert output.read_bytes() == whole


def test_error_rows_alone_need_no_engine(model: Path, tmp_path: Path, output: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", ["{"] * 2100)
    assert job(model, path, output, engine_factory=never_made).num_failed == 2100
    assert [row["id"] for row in read_rows(output)] == list(range(1, 2101))


@pytest.mark.parametrize("kept_bytes", [0, 1, 700, 1500, 2600, -2, -1])
def test_a_cut_output_is_completed_to_the_same_bytes(
    model: Path, prompts: Path, output: Path, whole: bytes, kept_bytes: int
) -> None:
    with pytest.raises(JobError):
        job(model, prompts, output, engine_factory=failing(RuntimeError("boom")))
    output.write_bytes(whole[:kept_bytes])
    summary = job(model, prompts, output)
    assert output.read_bytes() == whole
    assert summary.num_skipped == whole[:kept_bytes].count(b"\n")
    is_torn = kept_bytes != 0 and not whole[:kept_bytes].endswith(b"\n")
    assert any("dropped a torn last line" in note for note in summary.notes) == is_torn


def test_a_chat_templates_now_is_when_the_job_began(tmp_path: Path, output: Path) -> None:
    model = letters_model(
        tmp_path / "model", chat_template="{{ strftime_now('%d %H:%M:%S') }}{{ messages[0].content }}"
    )
    rows = [{"id": number, "messages": [{"role": "user", "content": "hi"}]} for number in range(2)]
    prompts = write_rows(tmp_path / "in.jsonl", rows)
    job(model, prompts, output, batch_size=1)
    whole = output.read_bytes()
    manifest = json.loads(manifest_path(output).read_text())
    output.write_bytes(whole.splitlines(keepends=True)[0])
    time.sleep(1.1)
    assert job(model, prompts, output, batch_size=1).num_done == 2
    assert output.read_bytes() == whole
    manifest_path(output).write_text(json.dumps({**manifest, "began": "2001-02-03T04:05:06"}))
    output.write_bytes(b"")
    job(model, prompts, output, batch_size=1)
    assert output.read_bytes() != whole


def test_rows_missing_in_the_middle_get_the_same_bytes(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    job(model, prompts, output)
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:5] + lines[7:13]))
    job(model, prompts, output)
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("boom"), "rows 'row-8' to 'row-11': RuntimeError: boom"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lower zinfer.max_device_memory or zinfer.max_host_memory"),
        (MemoryError(), "begin anew with a smaller --batch-size and --restart"),
        (
            DiskReadError(5, "Input/output error", Path("/m/x.safetensors"), 4096),
            "/m/x.safetensors: reading at byte 4096",
        ),
    ],
)
def test_a_failing_engine_ends_the_job_and_keeps_the_rows(
    model: Path, prompts: Path, output: Path, whole: bytes, error: Exception, message: str
) -> None:
    with pytest.raises(JobError, match=re.escape(message)) as caught:
        job(model, prompts, output, engine_factory=failing(error))
    assert caught.value.__cause__ is error
    assert "run the same command again to go on" in str(caught.value)
    assert len(read_rows(output)) == 8
    assert job(model, prompts, output).num_skipped == 8
    assert output.read_bytes() == whole


def test_an_engine_that_cannot_be_made_leaves_nothing(model: Path, prompts: Path, output: Path) -> None:
    def broken(*_args: object, **_options: object) -> ResidentEngine:
        raise CheckpointError("layer 3 is missing")

    with pytest.raises(CheckpointError, match="layer 3 is missing"):
        job(model, prompts, output, engine_factory=broken)
    assert not output.exists()
    assert not manifest_path(output).exists()


def test_the_engine_is_always_destroyed(model: Path, prompts: Path, output: Path) -> None:
    made: list[ResidentEngine] = []

    def factory(*args: Any, **options: Any) -> ResidentEngine:
        made.append(FailingEngine(*args, **options))
        return made[-1]

    with pytest.raises(JobError):
        job(model, prompts, output, engine_factory=factory)
    assert [engine.is_destroyed for engine in made] == [True]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"max_new_tokens": 9}, "settings.max_new_tokens: 8 in the manifest, 9 now"),
        ({"batch_size": 5}, "settings.batch_size: 4 in the manifest, 5 now"),
        ({"config": {"dtype": "bf16"}}, "settings.dtype: float32 in the manifest, bfloat16 now"),
        ({"config": {"max_out_tokens": 64}}, "settings.max_out_tokens: the model's in the manifest, 64 now"),
    ],
)
def test_other_settings_are_refused(
    model: Path, prompts: Path, output: Path, whole: bytes, changed: dict[str, Any], what: str
) -> None:
    job(model, prompts, output)
    with pytest.raises(UnusableInput, match=re.escape(what)):
        job(model, prompts, output, **changed, engine_factory=never_made)
    assert output.read_bytes() == whole


def test_memory_budgets_are_no_other_settings(model: Path, prompts: Path, output: Path) -> None:
    job(model, prompts, output)
    job(model, prompts, output, config={"zinfer": {"max_host_memory": "1GB"}}, engine_factory=never_made)


def test_another_model_of_the_same_shape_is_refused(model: Path, prompts: Path, output: Path, tmp_path: Path) -> None:
    job(model, prompts, output)
    with pytest.raises(UnusableInput, match=r"model\.weights_sample"):
        job(letters_model(tmp_path / "other", chat_template=CHAT_TEMPLATE, seed=1), prompts, output)


def test_another_input_is_refused_until_restart(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    job(model, prompts, output)
    write_rows(prompts, [{"id": "new", "prompt": "x"}])
    with pytest.raises(UnusableInput, match=r"input\.sha256(.|\n)*--restart"):
        job(model, prompts, output)
    assert output.read_bytes() == whole
    job(model, prompts, output, restart=True)
    assert [row["id"] for row in read_rows(output)] == ["new"]


def test_restart_keeps_the_former_rows_until_the_model_is_loaded(
    model: Path, prompts: Path, output: Path, whole: bytes
) -> None:
    job(model, prompts, output)

    def broken(*_args: object, **_options: object) -> ResidentEngine:
        raise CheckpointError("layer 3 is missing")

    with pytest.raises(CheckpointError):
        job(model, prompts, output, restart=True, engine_factory=broken)
    assert output.read_bytes() == whole


@pytest.mark.parametrize("change", ["renamed rows", "fewer rows"])
def test_an_input_that_changes_under_way_is_noticed(
    model: Path, prompts: Path, output: Path, tmp_path: Path, change: str
) -> None:
    class Meddling(ResidentEngine):
        def generate(self, **kwargs: Any) -> Any:
            data = prompts.read_bytes()
            prompts.write_bytes(data.replace(b"tail", b"TAIL") if change == "renamed rows" else data[:200_000])
            return super().generate(**kwargs)

    tail = [{"id": f"tail-{number}", "prompt": "a" * 3000} for number in range(200)]
    write_rows(prompts, [*prompt_rows(4), *tail])
    with pytest.raises(JobError, match="was changed while the job ran"):
        job(model, prompts, output, engine_factory=Meddling)
    assert len(read_rows(output)) >= 4


@pytest.mark.parametrize("option", ["max_new_tokens", "batch_size"])
def test_numbers_below_one_are_refused(model: Path, prompts: Path, output: Path, option: str) -> None:
    with pytest.raises(UnusableInput, match=f"{option} must be at least 1, not 0"):
        job(model, prompts, output, **{option: 0})


def test_the_input_is_no_output(model: Path, prompts: Path) -> None:
    before = prompts.read_bytes()
    with pytest.raises(UnusableInput, match="is the input file"):
        job(model, prompts, prompts, restart=True)
    assert prompts.read_bytes() == before


def test_a_bad_configuration_is_refused_first(model: Path, prompts: Path, output: Path) -> None:
    with pytest.raises(ConfigError, match="zero_optimisation"):
        job(model, prompts, output, config={"zero_optimisation": {}})
    assert not output.exists()


def test_keys_without_effect_are_said_once(model: Path, prompts: Path, output: Path) -> None:
    notes = job(model, prompts, output, config={"train_batch_size": 4}).notes
    assert [note for note in notes if "train_batch_size" in note] == [
        note for note in notes if "without effect" in note
    ]
    assert len([note for note in notes if "without effect: train_batch_size (" in note]) == 1


def made(num_prompt: int, num_new: int) -> Prompt:
    return Prompt(Row(id=num_prompt, prompt="p"), (3,) * num_prompt, num_new, frozenset())


def test_a_batch_is_parted_where_rows_would_lead_each_other_past_the_positions() -> None:
    prompts = [made(100, 8), made(110, 18), made(4, 100), made(20, 20), made(120, 8)]
    assert fitting_parts(prompts, 128) == [tuple(prompts[:2]), tuple(prompts[2:4]), (prompts[4],)]
    assert fitting_parts(prompts, None) == [tuple(prompts)]


def test_a_long_prompt_and_a_long_answer_share_a_job(model: Path, tmp_path: Path, output: Path) -> None:
    rows = [{"id": "p", "prompt": "a" * 120, "max_new_tokens": 8}, {"id": "n", "prompt": "a", "max_new_tokens": 120}]
    job(model, write_rows(tmp_path / "in.jsonl", rows), output)
    long_prompt, long_answer = read_rows(output)
    assert long_prompt["num_output_tokens"] == 8
    assert long_answer["num_output_tokens"] > 8
