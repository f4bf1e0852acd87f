"""Predict a whole job by rows from all over its input, which may be longer in one part than in another."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from zinfer.jobs.completer import Completer
from zinfer.jobs.progress import JobForecast, Stretch
from zinfer.jobs.prompts import Batch, Prompt
from zinfer.jobs.row_sample import RowSample
from zinfer.jobs.rows import RowState
from zinfer.planning.step_time import speed
from zinfer.units import duration

_NUM_STRETCHES: Final = 4
_MOST_BATCHES: Final = 16
"""Of a stretch, that are predicted."""


def forecast_job(
    completer: Completer, sample: RowSample, states: bytearray, batch_size: int, num_shares: int
) -> JobForecast:
    """Predict the rows that an output lacks, by batches like those of each of a few parts of the input.

    Args:
        states: [rows of the input] RowState by ordinal.
        num_shares: groups of ranks that compute batches side by side.
    """
    missing = [states.count(RowState.MISSING, *sample.ordinals(place)) for place in range(sample.num_read)]
    places = [place for place, count in enumerate(missing) if count]
    num_usable = sum(missing[place] for place in places if isinstance(sample.rows[place], Prompt))
    num_parts = max(min(_NUM_STRETCHES, num_usable // batch_size, len(places)), 1)
    bounds = [number * len(places) // num_parts for number in range(num_parts + 1)]
    stretches, texts = [], []
    for begin, end in pairwise(bounds):
        part = places[begin:end]
        prompts = [row for place in part if isinstance(row := sample.rows[place], Prompt)]
        num_missing = sum(missing[place] for place in part)
        num_computed = round(num_missing * len(prompts) / len(part))
        batches = _typical_batches(prompts, min(batch_size, num_computed))
        forecasts = [completer.forecast(each) for each in batches]
        times = num_computed / max(sum(map(len, batches)), 1)
        stretches.append(Stretch.of(forecasts, num_missing, num_computed, times, num_shares))
        texts += [each.text for each in forecasts[:1]]
    return JobForecast(_text(stretches, texts), tuple(stretches))


def forecast_batch(completer: Completer, batch: Batch, num_shares: int) -> JobForecast:
    """Predict a batch, of which the output may have some rows; these may be computed again with the others."""
    forecast = completer.forecast(batch.prompts)
    num_computed = sum(not completer.follows(each) for each in batch.prompts)
    return JobForecast(forecast.text, (Stretch.of([forecast], len(batch.missing), num_computed, 1.0, num_shares),))


def _typical_batches(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    """Return batches of neighbours, evenly spread; one with each prompt several times if batches are that large."""
    if not prompts or not size:
        return []
    if size >= len(prompts):
        return [[prompts[number * len(prompts) // size] for number in range(size)]]
    num_batches = len(prompts) // size
    count = min(num_batches, _MOST_BATCHES)
    begins = [number * num_batches // count * size for number in range(count)]
    return [prompts[begin : begin + size] for begin in begins]


def _text(stretches: Sequence[Stretch], texts: Sequence[str]) -> str:
    whole = JobForecast("", tuple(stretches))
    if not texts:
        return "nothing, since no sampled row can be used"
    if not whole.tokens_per_s:
        return texts[0]
    rows = f"{duration(whole.seconds(whole.num_rows))} for {whole.num_rows:,} rows, {speed(whole.tokens_per_s)}"
    return f"{rows}; batches at the beginning: {texts[0]}"
