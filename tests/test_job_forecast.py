"""A job is predicted by rows from all over its input, and its ETA goes by what the rows that are left take."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from jobs_support import letters_model, write_rows

from zinfer.jobs import run_job
from zinfer.jobs.completer import Completer
from zinfer.jobs.job_forecast import forecast_batch, forecast_job
from zinfer.jobs.progress import Forecast, JobForecast, Meter, Stretch
from zinfer.jobs.prompts import Batch, Prompt
from zinfer.jobs.row_sample import RowSample
from zinfer.jobs.rows import BadRow, Row, RowState
from zinfer.jobs.summary import JobSummary
from zinfer.requests.sampling_params import SamplingParams
from zinfer.units import duration

BATCH_SIZE = 10


class SlowestRow:
    """Takes a second for each new token of a batch's longest row."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def follows(self, prompt: Prompt) -> bool:
        return prompt.written_ids is not None

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        self.sizes.append(len(prompts))
        prompts = [each for each in prompts if not self.follows(each)]
        passes = max(each.max_new_tokens for each in prompts)
        num_new = sum(each.max_new_tokens for each in prompts)
        return Forecast(f"{passes} s", num_new / passes, passes, passes)


def prompt(new_tokens: int) -> Prompt:
    return Prompt(Row(id=1, prompt="p", params=SamplingParams(max_new_tokens=new_tokens)), (3,), 1)


def predicted(
    rows: Sequence[Prompt | BadRow], num_rows: int, batch_size: int = BATCH_SIZE, num_done: int = 0, num_shares: int = 1
) -> tuple[JobForecast, list[int]]:
    """What is predicted of an input by sampled rows, and the sizes of the batches that were simulated."""
    states = bytearray([RowState.DONE] * num_done + [RowState.MISSING] * (num_rows - num_done))
    completer = SlowestRow()
    sample = RowSample(num_rows, tuple(rows))
    return forecast_job(cast(Completer, completer), sample, states, batch_size, num_shares), completer.sizes


RISING = [prompt(10)] * 30 + [prompt(50)] * 10


@pytest.mark.parametrize("times", [1, 25])
def test_later_rows_that_take_longer_are_predicted(times: int) -> None:
    found, sizes = predicted(RISING, 40 * times)
    assert found.num_rows == 40 * times
    assert found.seconds(30 * times) == pytest.approx(3 * times * 10), "batches of ten rows with ten tokens each"
    assert found.seconds(40 * times) == pytest.approx(3 * times * 10 + times * 50)
    assert found.passes(40 * times) == found.seconds(40 * times)
    assert found.tokens_per_s == pytest.approx((300 + 500) / 80)
    assert found.text.startswith("1 min 20 s for 40 rows, 10.0 tokens/s; " if times == 1 else "33 min")
    assert sizes == [10] * 4


def test_large_batches_have_the_sampled_rows_several_times() -> None:
    found, sizes = predicted(RISING, 4000, batch_size=500)
    assert sizes == [500] * 4
    assert found.seconds(4000) == pytest.approx(6 * 10 + 2 * 50)


def test_of_small_batches_some_are_predicted() -> None:
    found, sizes = predicted([prompt(4)] * 400, 400, batch_size=2)
    assert sizes == [2] * 64
    assert found.seconds(400) == pytest.approx(200 * 4)


def test_rows_that_are_done_or_cannot_be_used_take_nothing() -> None:
    bad = BadRow("b", "bad")
    rows = [*RISING[:30], *(each for long in RISING[30:] for each in (long, bad))]
    found, _ = predicted(rows, 50, num_done=30)
    assert found.num_rows == 20
    assert found.seconds(20) == pytest.approx(50)
    assert found.row_s == pytest.approx(5), "of the rows that can be used"
    assert predicted([bad], 50)[0].text == "nothing, since no sampled row can be used"


def test_groups_of_ranks_share_the_time() -> None:
    alone, _ = predicted(RISING, 40)
    several, _ = predicted(RISING, 40, num_shares=2)
    assert several.seconds(40) == alone.seconds(40) / 2
    assert several.tokens_per_s == alone.tokens_per_s * 2
    assert several.passes(40) == alone.passes(40)


def of_batch(prompts: Sequence[Prompt], num_missing: int) -> JobForecast:
    """What is predicted of a batch whose last rows are missing."""
    missing = list(enumerate(prompts))[-num_missing:]
    return forecast_batch(cast(Completer, SlowestRow()), Batch(tuple(missing), tuple(prompts)), 1)


def test_a_batch_is_predicted_by_its_rows() -> None:
    fresh = of_batch(RISING, 40)
    assert (fresh.text, fresh.seconds(40)) == ("50 s", 50)
    assert fresh.batch(0, 40) == (50, 50)
    resumed = of_batch(RISING, 10)
    assert resumed.seconds(10) == 50
    assert resumed.batch(0, 40) == (50, 50), "rows that the output has are computed with the others"
    written = [replace(each, written_ids=((5,),)) for each in RISING[:30]]
    resumed = of_batch([*written, *RISING[30:]], 10)
    assert resumed.seconds(10) == 50, "or keep their places"
    assert resumed.batch(0, 10) == (50, 50)


def test_the_eta_is_that_of_the_rows_that_are_left() -> None:
    meter = Meter()
    meter.num_rows, meter.forecast = 40, predicted(RISING, 40)[0]
    meter.begin("running")
    assert meter.eta_s == pytest.approx(80, rel=0.01)
    for _ in range(3):
        meter.begin_batch(BATCH_SIZE, BATCH_SIZE)
        meter.add_finished(BATCH_SIZE)
        meter.end_batch()
    meter.running_since_s = time.monotonic() - 60
    meter.begin_batch(BATCH_SIZE, BATCH_SIZE)
    assert meter.eta_s == pytest.approx(100, rel=0.06), "twice what was predicted, as so far"
    meter.add_finished(BATCH_SIZE)
    assert meter.eta_s == 0


def test_rows_whose_seconds_are_unknown_go_by_their_passes() -> None:
    meter = Meter()
    stretches = Stretch(10, 10, num_passes=1), Stretch(10, 10, num_passes=9)
    meter.num_rows, meter.forecast = 20, JobForecast("", stretches)
    assert meter.eta_s is None
    meter.begin_batch(10, 10)
    meter.add_finished(10)
    meter.end_batch()
    meter.running_since_s = time.monotonic() - 10
    assert meter.eta_s == pytest.approx(90, rel=0.01)


def job_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[JobSummary, list[JobForecast]]:
    """Runs a job of four batches, the last of longer rows; returns the forecast that each batch begins with."""
    if not (folder / "model").exists():
        letters_model(folder / "model")
    rows = [{"id": str(at), "prompt": chr(97 + at % 26) * (2 if at < 30 else 90)} for at in range(40)]
    limits = [{} if options else {"max_new_tokens": 2 if at < 30 else 20, "ignore_eos": True} for at in range(40)]
    write_rows(folder / "in.jsonl", [row | limit for row, limit in zip(rows, limits, strict=True)])
    seen: list[JobForecast] = []
    begin = Meter.begin_batch

    def noted(meter: Meter, num_missing: int, num_rows: int) -> None:
        seen.append(meter.forecast)
        begin(meter, num_missing, num_rows)

    monkeypatch.setattr(Meter, "begin_batch", noted)
    given = [folder / name for name in ("model", "in.jsonl", "out.jsonl")]
    summary = run_job(*given, device="cpu", batch_size=BATCH_SIZE, **options)
    monkeypatch.undo()
    return summary, seen


def test_a_job_says_what_all_its_rows_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch has the shortest rows; a job that goes on counts those that are missing."""
    summary, [forecast, *others] = job_of(tmp_path, monkeypatch)
    assert others == [forecast] * 3
    assert forecast.num_rows == 40
    [line] = [note for note in summary.notes if note.startswith("predicted: ")]
    assert " for 40 rows, " in line
    assert duration(summary.predicted_s) in line, "the summary repeats it"
    assert summary.predicted_s == pytest.approx(forecast.seconds(40))
    assert round(summary.predicted_passes) == round(forecast.passes(40))
    assert forecast.passes(40) - forecast.passes(30) > 5 * forecast.passes(10)
    assert summary.predicted_tokens_per_s == pytest.approx(forecast.tokens_per_s)
    assert forecast.seconds(40) == pytest.approx(summary.passes_predicted_s, rel=0.05), "as of those computed"
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:25]))
    _, [again, _] = job_of(tmp_path, monkeypatch)
    assert again.num_rows == 15
    assert forecast.seconds(10) < again.seconds(15) < forecast.seconds(40)


def test_a_job_that_embeds_is_predicted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = job_of(tmp_path, monkeypatch, task="embed")
    assert [each.passes(40) for each in seen] == [4] * 4
