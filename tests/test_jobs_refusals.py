"""A job refuses what does not fit the rows it would go on from, and says why."""

import re
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import job, model, never_made, output, prompts, whole
from jobs_support import CHAT_TEMPLATE, ResidentEngine, letters_model, prompt_rows, read_rows, write_rows

from zinfer.errors import CheckpointError, ConfigError, JobError
from zinfer.jobs import UnusableInput

__all__ = ["model", "output", "prompts", "whole"]  # fixtures


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
