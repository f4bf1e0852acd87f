"""A job refuses what does not fit the rows it would go on from, and says why."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import finish, job, model, never_made, output, prompts, whole
from jobs_support import CHAT_TEMPLATE, ResidentEngine, letters_model, prompt_rows, read_rows, write_rows

from zinfer.errors import CheckpointError, ConfigError, JobError
from zinfer.jobs import UnusableInput
from zinfer.jobs.request import manifest_path

__all__ = ["model", "output", "prompts", "whole"]  # fixtures


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"max_new_tokens": 9}, "settings.max_new_tokens: 8 in the manifest, 9 now"),
        ({"batch_size": 5}, "settings.batch_size: 4 in the manifest, 5 now"),
        ({"config": {"dtype": "bf16"}}, "settings.dtype: float32 in the manifest, bfloat16 now"),
        ({"config": {"dtype": "int8"}}, "settings.quantization: absent in the manifest, {"),
        ({"config": {"max_out_tokens": 64}}, "settings.max_out_tokens: the model's in the manifest, 64 now"),
    ],
)
def test_other_settings_are_refused(
    model: Path, prompts: Path, output: Path, whole: bytes, changed: dict[str, Any], what: str
) -> None:
    finish(model, prompts, output)
    with pytest.raises(UnusableInput, match=re.escape(what)):
        job(model, prompts, output, **changed, engine_factory=never_made)
    assert output.read_bytes() == whole


@pytest.mark.parametrize("output", [".", "", "/"])
def test_a_folder_is_no_output(model: Path, prompts: Path, output: str) -> None:
    with pytest.raises(UnusableInput, match="is a folder; give a file in it"):
        job(model, prompts, Path(output), engine_factory=never_made)


def test_memory_budgets_are_no_other_settings(model: Path, prompts: Path, output: Path) -> None:
    finish(model, prompts, output)
    job(model, prompts, output, config={"zinfer": {"max_host_memory": "1GB"}}, engine_factory=never_made)


def test_another_model_of_the_same_shape_is_refused(model: Path, prompts: Path, output: Path, tmp_path: Path) -> None:
    finish(model, prompts, output)
    with pytest.raises(UnusableInput, match=r"holds other weights than when this job began"):
        job(letters_model(tmp_path / "other", chat_template=CHAT_TEMPLATE, seed=1), prompts, output)


def test_another_input_is_refused_until_restart(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    finish(model, prompts, output)
    write_rows(prompts, [{"id": "new", "prompt": "x"}])
    with pytest.raises(UnusableInput, match=r"input\.sha256(.|\n)*--restart"):
        job(model, prompts, output)
    assert output.read_bytes() == whole
    job(model, prompts, output, restart=True)
    assert [row["id"] for row in read_rows(output)] == ["new"]


def test_restart_keeps_the_former_rows_until_the_model_is_loaded(
    model: Path, prompts: Path, output: Path, whole: bytes
) -> None:
    finish(model, prompts, output)

    def broken(*_args: object, **_options: object) -> ResidentEngine:
        raise CheckpointError("layer 3 is missing")

    with pytest.raises(CheckpointError):
        job(model, prompts, output, restart=True, engine_factory=broken)
    assert output.read_bytes() == whole


def meddling(meddle: Callable[[], object]) -> type[ResidentEngine]:
    """An engine before whose first batch something happens."""

    class Meddling(ResidentEngine):
        def generate(self, **kwargs: Any) -> Any:
            if self.calls == 0:
                meddle()
            return super().generate(**kwargs)

    return Meddling


def long_input(path: Path) -> Path:
    """Two batches, with more rows between them than are read at once."""
    between = [{"id": f"long-{number}", "prompt": "a" * 3000} for number in range(200)]
    tail = [{"id": f"tail-{number}", "prompt": "abc"} for number in range(4)]
    return write_rows(path, [*prompt_rows(4), *between, *tail])


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("change", "keeps_time"),
    [
        pytest.param(lambda data: data.replace(b"abc", b"xyz"), False, marks=pytest.mark.slow),
        (lambda data: data.replace(b"abc", b"xyz"), True),
        pytest.param(lambda data: data.replace(b"tail", b"TAIL"), True, marks=pytest.mark.slow),
        pytest.param(lambda data: data[:200_000], False, marks=pytest.mark.slow),
        (lambda data: data[:200_000], True),
        (lambda data: data + b'{"id": "more", "prompt": "a"}\n', False),
        pytest.param(lambda data: b"\n" + data, False, marks=pytest.mark.slow),
    ],
)
def test_an_input_that_changes_under_way_stops_the_job(
    model: Path, prompts: Path, output: Path, change: Callable[[bytes], bytes], keeps_time: bool
) -> None:
    data, times = long_input(prompts).read_bytes(), prompts.stat()

    def meddle() -> None:
        prompts.write_bytes(change(data))
        if keeps_time:
            os.utime(prompts, ns=(times.st_atime_ns, times.st_mtime_ns))

    message = f"input {prompts} was changed while the job ran; the rows written so far belong to the former input"
    with pytest.raises(JobError, match=re.escape(message)):
        job(model, prompts, output, engine_factory=meddling(meddle))
    assert [row["id"] for row in read_rows(output)][:4] == [f"row-{number}" for number in range(4)]
    prompts.write_bytes(data)
    assert job(model, prompts, output).num_done == 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", ["the same bytes", "a new file"])
def test_an_input_whose_rows_stay_may_be_written_again(model: Path, prompts: Path, output: Path, change: str) -> None:
    data = long_input(prompts).read_bytes()

    def meddle() -> None:
        if change == "the same bytes":
            with prompts.open("r+b") as file:
                file.write(data)
        else:
            prompts.unlink()
            write_rows(prompts, prompt_rows(1))

    assert job(model, prompts, output, engine_factory=meddling(meddle)).num_done == 8


def test_an_empty_input_is_done_at_once(model: Path, prompts: Path, output: Path) -> None:
    finish(model, prompts, output)
    prompts.write_bytes(b"\n")
    with pytest.raises(UnusableInput, match=r"input\.sha256"):
        job(model, prompts, output, engine_factory=never_made)
    for options in ({"restart": True}, {}, {"report": output.with_suffix(".html")}):
        summary = job(model, prompts, output, engine_factory=never_made, **options)
        assert (summary.num_rows, summary.exit_code) == (0, 0)
        assert output.read_bytes() == b""
        assert manifest_path(output).exists()


@pytest.mark.parametrize("option", ["max_new_tokens", "batch_size"])
def test_numbers_below_one_are_refused(model: Path, prompts: Path, output: Path, option: str) -> None:
    with pytest.raises(UnusableInput, match=f"{option} must be at least 1, not 0"):
        job(model, prompts, output, **{option: 0})


def test_the_input_is_no_output(model: Path, prompts: Path) -> None:
    before = prompts.read_bytes()
    with pytest.raises(UnusableInput, match="is the input file"):
        job(model, prompts, prompts, restart=True)
    assert prompts.read_bytes() == before


@pytest.mark.parametrize("option", ["input", "output", "report"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_path_that_cannot_be_looked_at_is_refused(
    model: Path, prompts: Path, output: Path, option: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"input": prompts, "output": output, "report": output.with_suffix(".html")}
    paths[option] = output.with_name("n" * 300 if code == errno.ENAMETOOLONG else "closed") / "file"
    looked = os.stat

    def look(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(output.with_name("closed"))):  # root may search every folder
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return looked(path, **options)

    monkeypatch.setattr(os, "stat", look)
    message = re.escape(f"{os.strerror(code)} (errno {code})")
    with pytest.raises(UnusableInput, match=message):
        job(model, paths["input"], paths["output"], report=paths["report"], engine_factory=never_made)
    assert not output.exists()


def test_a_bad_configuration_is_refused_first(model: Path, prompts: Path, output: Path) -> None:
    with pytest.raises(ConfigError, match="zero_optimisation"):
        job(model, prompts, output, config={"zero_optimisation": {}})
    assert not output.exists()
