"""What a job shows while it runs and at its end."""

import io
import re
import time

import pytest
from rich.console import Console

from zinfer.display import HEARTBEAT_S, shown
from zinfer.jobs.progress import Meter
from zinfer.jobs.summary import JobSummary, summary_table
from zinfer.offload.stats import RunStats
from zinfer.units import human_bytes


def test_the_heartbeat_comes_at_least_every_10_s() -> None:
    assert HEARTBEAT_S <= 10


def test_a_heartbeat_is_written_while_a_batch_takes_long() -> None:
    stream = io.StringIO()
    with shown(Meter(Console(file=stream)), interval_s=0.05) as meter:
        time.sleep(0.2)
        meter.num_rows, meter.num_finished = 200, 64
        meter.begin("running")
        meter.begin_batch(32, 32)
        meter.num_tokens, meter.batch_share = 1000, 0.5
        time.sleep(0.3)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "zinfer: checking, 0:00:00 elapsed"
    assert re.fullmatch(
        r"zinfer: running, 64/200 rows, 32 under way at 50%, [\d.,]+ tokens/s now, [\d.,]+ overall, 0:00:0\d"
        r" elapsed, ETA 0:00:0\d",
        lines[-1],
    )
    assert 4 <= len(lines) <= 10


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    with shown(Meter(Console(file=stream, force_terminal=True, width=120))) as meter:
        meter.num_rows, meter.num_finished = 200, 64
        meter.begin("running")
        time.sleep(0.6)
        meter.note("something to say")
    assert "64/200 rows" in stream.getvalue()
    assert "━" in stream.getvalue()
    assert "something to say" in stream.getvalue()


def test_the_eta_counts_this_runs_rows_only() -> None:
    meter = Meter()
    meter.num_rows, meter.num_finished, meter.num_skipped = 100, 60, 50
    meter.begin_batch(10, 10)
    meter.end_batch()
    meter.begin_batch(20, 20)
    meter.batch_share = 0.5
    assert meter.eta_s == 0.0
    meter.running_since_s = time.monotonic() - 40
    eta_s = meter.eta_s
    assert eta_s == pytest.approx(60, rel=0.01)


def test_the_eta_goes_by_the_prediction_first_and_by_passes_then() -> None:
    meter, passes = Meter(), 3
    meter.count_passes = lambda: passes
    meter.num_rows = 200
    meter.predicted_row_s, meter.predicted_row_passes = 0.5, 0.4
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
    def said(computing_s: float) -> str:
        stream = io.StringIO()
        summary = JobSummary(9, 9, 0, 0, 50, 60, 75.0, 30.0, 2.0, computing_s, None, ())
        Console(file=stream, width=100).print(summary_table(summary))
        return stream.getvalue()

    assert "2.00 s / 59.46 s" in said(59.46)
    assert " x" not in said(59.46)
    assert "2.00 s / 90.00 s (45.00 x as long)" in said(90.0)


def test_the_table_names_bytes_and_stalls() -> None:
    stats = RunStats(
        bytes_read_disk=3_000_000_000,
        bytes_to_device=2_000,
        passes=7,
        blocks_by_home={"DEVICE": 1, "HOST": 2, "DISK": 3},
        stall_s={"disk": 1.25, "link": 0.0},
        link_share=0.995,
        disk_share=0.02,
    )
    stream = io.StringIO()
    summary = JobSummary(
        9, 7, 2, 4, 50, 60, 75.0, 30.0, 20.0, 25.0, stats, (), "out/rows.jsonl", {"too long": 1, "malformed": 1}
    )
    Console(file=stream, width=100).print(summary_table(summary))
    text = stream.getvalue()
    for part in (
        "7 done, 2 failed: 1 x too long, 1 x malformed; 4 rows before this run",
        "50 / 60",
        "tokens/s │                                         2.0",
        "0:01:15 (30.0 s of it running)",
        "3,000,000,000 (3.00 GB)",
        "DEVICE 1, HOST 2, DISK 3",
        "disk 1.25 s, link 0.00 s",
        "20.00 s / 25.00 s",
        "out/rows.jsonl",
        "link 99.5%, disk 2.0%",
    ):
        assert part in re.sub(r"tokens/s\s+│\s+2\.0", "tokens/s │                                         2.0", text)
    assert human_bytes(999) == "999 B"
    assert human_bytes(2_500_000_000_000) == "2.50 TB"
