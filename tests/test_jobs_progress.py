"""What a job shows while it runs and at its end."""

import io
import re
import time
from bisect import bisect
from dataclasses import replace
from itertools import accumulate

import pytest
from rich.console import Console

from zinfer.display import HEARTBEAT_S, shown
from zinfer.jobs.progress import Forecast, JobForecast, Load, Meter, Stretch
from zinfer.jobs.summary import JobSummary, summary_table
from zinfer.offload.stats import RunStats
from zinfer.units import human_bytes


def alike(num_rows: int, forecast: Forecast, num_forecast: int) -> JobForecast:
    """A job of so many rows like those of a forecast."""
    return JobForecast("", (Stretch.of([forecast], num_rows, num_rows, num_rows / num_forecast),))


def test_the_heartbeat_comes_at_least_every_10_s() -> None:
    assert HEARTBEAT_S <= 10


def test_a_heartbeat_is_written_while_a_batch_takes_long() -> None:
    stream = io.StringIO()
    with shown(Meter(Console(file=stream)), interval_s=0.05) as meter:
        time.sleep(0.2)
        meter.num_rows, meter.num_finished = 200, 64
        meter.begin("running")
        meter.forecast = alike(136, Forecast("", num_passes=20), 32)
        meter.begin_batch(32, 32)
        meter.load = lambda: Load(10, 2000, 1000)
        time.sleep(0.3)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "zinfer: checking, 0:00:00 elapsed"
    assert re.fullmatch(
        r"zinfer: running, 64/200 rows, pass 10 of 20, [\d.,]+ tokens/s now, [\d.,]+ overall, 0:00:0\d"
        r" elapsed, ETA 0:00:0\d",
        lines[-1],
    )
    assert 4 <= len(lines) <= 10


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    with shown(Meter(Console(file=stream, force_terminal=True, width=80))) as meter:
        meter.num_rows, meter.num_finished = 200, 64
        meter.begin("running")
        time.sleep(0.6)
        meter.note("something to say")
    assert "64/200 rows, 0.0 tokens/s, ETA " in stream.getvalue()
    assert "━" in stream.getvalue()
    assert "something to say" in stream.getvalue()


@pytest.mark.parametrize("num_rows", [200, 10_000_000])
def test_a_terminal_says_rows_speed_and_eta_in_one_line(num_rows: int) -> None:
    meter, passes = Meter(), 0
    meter.load = lambda: Load(passes, 2_000_000, 1_000_000)
    meter.num_rows = num_rows
    meter.forecast = alike(num_rows, Forecast("", 10.0, 50.0, 100), 100)
    meter.begin("running")
    meter.begin_batch(num_rows, num_rows)
    meter.running_since_s = time.monotonic() - 99.5  # half a second before the rate falls below 10,000
    passes = 1
    assert "predicted" not in meter.short_line(80), "no pass has ended"
    passes = num_rows // 2
    line = meter.short_line(80)
    assert re.match(rf"0/{num_rows:,} rows, 10,0\d\d\.\d tokens/s \([\d,]+% of predicted\), ETA \d+:\d\d:\d\d", line)
    assert len(line) <= 80
    assert line.endswith(f"pass {num_rows // 2:,} of {num_rows:,}") == (num_rows == 200)


def test_the_eta_counts_this_runs_rows_only() -> None:
    meter = Meter()
    meter.num_rows, meter.num_finished, meter.num_skipped = 100, 60, 50
    meter.forecast = alike(50, Forecast("", num_passes=40), 20)
    meter.begin_batch(10, 10)
    meter.end_batch()
    meter.begin_batch(20, 20)
    meter.load = lambda: Load(20)
    assert meter.eta_s == 0.0
    meter.running_since_s = time.monotonic() - 40
    eta_s = meter.eta_s
    assert eta_s == pytest.approx(60, rel=0.01)


def test_the_eta_goes_by_the_prediction_first_and_by_passes_then() -> None:
    meter, passes = Meter(), 3
    meter.load = lambda: Load(passes)
    meter.num_rows = 200
    meter.forecast = alike(200, Forecast("", seconds=50, num_passes=40), 100)
    meter.begin("running")
    assert meter.eta_s == pytest.approx(100, rel=0.01)
    meter.begin_batch(100, 100)
    assert meter.eta_s == pytest.approx(100, rel=0.01), "no row has ended, none will for minutes"
    passes = 3 + 20  # of 40: half of the batch, at four times the predicted seconds
    meter.running_since_s = time.monotonic() - 100
    assert "0/200 rows, pass 20 of 40, " in meter.line()
    eta_s = meter.eta_s
    assert eta_s is not None
    assert 250 < eta_s <= 300
    assert meter.share() == pytest.approx(0.25)
    passes = 3 + 45
    assert "pass 45 (40 predicted), " in meter.line()
    share = meter.share()
    assert share is not None
    assert share < 0.5
    assert "prediction" not in meter.line()
    meter.end_batch()
    assert "pass" not in meter.line()


def test_a_factor_is_said_of_long_jobs_alone() -> None:
    def told(computing_s: float) -> str:
        stream = io.StringIO()
        summary = JobSummary(9, 9, 0, 0, 50, 60, 75.0, 30.0, 2.0, computing_s, None, ())
        Console(file=stream, width=100).print(summary_table(summary))
        return stream.getvalue()

    assert "2 s for passes; they took 59.5 s" in told(59.46)
    assert " x" not in told(59.46)
    assert "2 s for passes; they took 1 min 30 s (45.00 x as long)" in told(90.0)


def said(summary: JobSummary) -> dict[str, str]:
    """The rows of the table."""
    stream = io.StringIO()
    Console(file=stream, width=80).print(summary_table(summary))
    cells = [line.strip("│").split("│") for line in stream.getvalue().splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in cells}


def test_the_table_says_what_was_done_how_fast_and_what_bounded_it() -> None:
    stats = RunStats(
        bytes_read_disk=3_000_000_000,
        bytes_to_device=2_000,
        streamed_bytes_per_pass=7_400_000_000,
        passes=7,
        blocks_by_home={"DEVICE": 3, "HOST": 12, "DISK": 0},
        stall_s={"disk": 1.25, "host": 0.0, "link": 4.5, "compute": 2.0},
        link_share=0.995,
        disk_share=0.0,
        host_bytes=5_000,
        span_s=20.0,
    )
    summary = JobSummary(9, 7, 2, 4, 50, 60, 75.0, 30.0, 20.0, 25.0, stats, (), "out/rows.jsonl", {"malformed": 2})
    summary = replace(summary, predicted_passes=9.0)
    assert said(summary) == {
        "rows": "7 done, 2 failed: 2 x malformed; 4 rows before this run",
        "tokens": "50 in, 60 out",
        "output": "out/rows.jsonl",
        "speed": "2.0 tokens/s",
        "time": "1 min 15 s, 30 s after loading",
        "predicted": "20 s for 9 passes; they took 25 s for 7",
        "passes": "7",
        "limited by": "PCIe: compute waited 1.25 s for the disk, 4.5 s for PCIe",
        "used": "99.5% of PCIe",
        "weights": "12 blocks in host memory, 3 on the GPU",
        "streamed": "7.40 GB each pass",
        "moved": "3.00 GB read from disk, 2.00 kB copied to the GPU",
        "memory": "5.00 kB in host memory",
    }


def test_the_table_has_no_row_of_nothing() -> None:
    stats = RunStats(blocks_by_home={"DEVICE": 1}, passes=1)
    summary = JobSummary(1, 1, 0, 0, 5, 0, 1.0, 0.5, 0.0, 0.5, stats, (), device="cpu")
    phase_s = {"checking": 0.25, "planning": 0.01, "loading": 0.5, "first pass": 0.3, "passes": 0.2}
    summary = replace(summary, phase_s=phase_s).of_process(3.0, 4.5)
    assert said(summary) == {
        "rows": "1 done, 0 failed",
        "tokens": "5 in",
        "time": "4.5 s, 500 ms after loading",
        "where it went": "starting 3.25 s, reading 500 ms, first pass 300 ms, passes",
        "": "200 ms, end 240 ms",
        "passes": "1",
        "limited by": "compute",
        "weights": "1 block in memory",
    }
    launched = replace(summary, passes_predicted_s=0.5, launching_s=0.4)
    assert said(launched)["limited by"] == "Python (launching)"


def test_a_run_without_a_gpu_has_no_words_of_one() -> None:
    stats = RunStats(
        blocks_by_home={"DEVICE": 1, "HOST": 2},
        passes=1,
        stall_s={"disk": 0.0, "host": 0.0, "link": 4.5, "compute": 0.0},
        link_share=0.5,
        bytes_to_device=8_000,
        span_s=5.0,
    )
    summary = JobSummary(1, 1, 0, 0, 5, 1, 1.0, 0.5, 0.0, 0.5, stats, (), device="cpu")
    rows = said(summary)
    assert rows["limited by"] == "host memory: compute waited 4.5 s for host memory"
    assert rows["used"] == "50.0% of host memory"
    assert not [value for value in rows.values() if "PCIe" in value or "GPU" in value]


def test_bytes_are_said_in_decimal_units() -> None:
    assert human_bytes(999) == "999 B"
    assert human_bytes(2_500_000_000_000) == "2.50 TB"


# (passes, predicted seconds of each, measured ones) in the order of a job: 256 rows through 8 layers on an H200, in
# passes of 8,192 tokens, with compiled kernels and without; and a model from a disk, whose first pass has all prompts.
MEASURED_JOBS = {
    "warm": [(1, 0.19, 0.37), (10, 0.17, 0.182), (18, 0.03, 0.05), (100, 0.012, 0.0164), (219, 0.0042, 0.0046)],
    "cold": [(1, 0.19, 4.2), (10, 0.17, 0.182), (18, 0.03, 0.05), (100, 0.012, 0.0164), (219, 0.0042, 0.0046)],
    "disk": [(1, 60.0, 78.0), (3, 20.0, 22.0), (60, 9.0, 9.9)],
}


@pytest.mark.parametrize("passes", MEASURED_JOBS.values(), ids=MEASURED_JOBS)
def test_the_eta_holds_from_a_tenth_of_a_job_on(
    passes: list[tuple[int, float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a quarter of what is left, or 3 % of the whole job, in replays of measured jobs."""
    each = [(predicted_s, took_s) for count, predicted_s, took_s in passes for _ in range(count)]
    predicted_s, ends_s = [*accumulate(one for one, _ in each)], [*accumulate(took_s for _, took_s in each)]
    now_s, whole_s, first_s = 0.0, ends_s[-1], each[0][1] - each[0][0]

    def load() -> Load:
        ended = bisect(ends_s, now_s)
        done = (predicted_s[ended - 1], now_s - ends_s[ended - 1]) if ended else (0.0, 0.0)
        return Load(ended + 1, predicted_s=done[0], since_s=done[1])

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    meter = Meter()
    meter.load, meter.num_rows = load, 256
    meter.forecast = alike(256, Forecast("", 10.0, predicted_s[-1], len(each)), 256)
    meter.begin("running")
    meter.begin_batch(256, 256)
    for step in range(1, 400):
        now_s = whole_s * step / 400
        eta_s, left_s = meter.eta_s, whole_s - now_s
        assert eta_s is not None
        if now_s > first_s + whole_s / 10:
            assert abs(eta_s - left_s) <= max(0.25 * left_s, 0.03 * whole_s), f"{now_s:.1f} of {whole_s:.1f} s"
