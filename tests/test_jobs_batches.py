"""Rows share a batch only while none would lead another past the model's positions."""

from pathlib import Path

from jobs_run_support import job, model, output
from jobs_support import read_rows, write_rows

from zinfer.jobs.padded import fitting_parts
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import Row
from zinfer.requests.sampling_params import SamplingParams

__all__ = ["model", "output"]  # fixtures


def made(num_prompt: int, num_new: int) -> Prompt:
    params = SamplingParams(max_new_tokens=num_new)
    return Prompt(Row(id=num_prompt, prompt="p", params=params), (3,) * num_prompt, 1)


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
