"""The page that a job ends with: what passes carried and waited for, over time."""

import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from jobs_run_support import model, output
from jobs_support import ResidentEngine, prompt_rows, write_rows

from zinfer.jobs import run_job
from zinfer.jobs.plot import Line, plot
from zinfer.jobs.run_page import write_run_page
from zinfer.jobs.summary import JobSummary
from zinfer.jobs.timeline import Load, Moment, Timeline
from zinfer.offload.stats import RunStats

__all__ = ["model", "output"]  # fixtures
SUMMARY = JobSummary(9, 7, 2, 4, 50, 60, 75.0, 30.0, 20.0, 25.0, None, ("a <note>",))


def points(svg: str, number: int = 0) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(svg).findall("polyline")[number].attrib["points"]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found.split())]


def test_a_plot_draws_each_known_value_to_scale() -> None:
    svg = plot("a <title>", [1.0, 2.0, 4.0], [Line("one", [0.0, None, 5.0]), Line("two", [10.0, 10.0, 20.0])])
    assert points(svg) == [(295.0, 174.0), (970.0, 136.5)]
    assert points(svg, 1) == [(295.0, 99.0), (520.0, 99.0), (970.0, 24.0)]
    assert "a &lt;title&gt;" in svg
    assert re.search(r">20</text>", svg)


def test_a_plot_of_nothing_is_empty() -> None:
    assert points(plot("nothing", [], [Line("one", [])])) == []


def test_the_page_shows_what_lies_between_moments(tmp_path: Path) -> None:
    moments = [
        Moment(0.0, Load(0, 0, 0), 0, 0.0, None, {"disk": 0.0, "compute": 0.0}),
        Moment(2.0, Load(600, 20, 5), 3, 1.0, None, {"disk": 0.5, "compute": 9.0}),
        Moment(4.0, Load(600, 20, 5, 7), 3, 3.0, None, {"disk": 0.5, "compute": 9.0}),
    ]
    write_run_page(tmp_path / "page.html", "out.jsonl", SUMMARY, moments)
    text = (tmp_path / "page.html").read_text()
    assert "a &lt;note&gt;" in text
    assert "<tr><td>tokens<td>50 in, 60 out</tr>" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    labels = [re.search(r'aria-label="(.*?)"', each).group(1) for each in pictures]  # type: ignore[union-attr]
    assert labels == [
        "tokens a pass",
        "new tokens a second",
        "share of the measured rate",
        "share of the time that compute",
        "texts",
    ]
    per_pass, a_second, used, waited, texts = pictures
    assert points(per_pass) == [(520.0, 24.0)]  # 200; no pass ended in the second half
    assert points(a_second) == [(520.0, 24.0), (970.0, 174.0)]  # 10 a second, then none
    assert points(used) == [(520.0, 99.0), (970.0, 24.0)]  # half of the link, then all of it
    assert points(used, 1) == []  # the disk's rate is not known
    assert points(waited) == [(520.0, 136.5), (970.0, 174.0)]  # a quarter of the time
    assert "waits for compute" not in waited
    assert points(texts, 1) == [(520.0, 174.0), (970.0, 24.0)]


def test_a_timeline_takes_moments_until_it_is_closed_and_thins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.jobs.timeline._MOST_MOMENTS", 8)
    timeline = Timeline(lambda: RunStats(passes=3), lambda: Load(1, 2, 3), interval_s=0.005)
    time.sleep(0.3)
    timeline.close()
    timeline.close()
    assert 2 <= len(timeline.moments) <= 9
    assert all(moment.passes == 3 and moment.load == Load(1, 2, 3) for moment in timeline.moments)
    times_s = [moment.at_s for moment in timeline.moments]
    assert times_s == sorted(times_s)


def test_a_timeline_that_cannot_look_says_so_when_it_is_closed() -> None:
    def broken() -> Load:
        raise RuntimeError("gone")

    timeline = Timeline(RunStats, broken, interval_s=0.001)
    with pytest.raises(RuntimeError, match="gone"):
        timeline.close()


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_job_writes_its_page(model: Path, tmp_path: Path, output: Path, is_padded: bool) -> None:
    page = tmp_path / "page.html"
    factory = ResidentEngine if is_padded else None
    prompts = write_rows(tmp_path / "in.jsonl", prompt_rows(9))
    run_job(model, prompts, output, device="cpu", report=page, engine_factory=factory, batch_size=4)
    text = page.read_text()
    assert "<tr><td>rows<td>9 done, 0 failed</tr>" in text
    assert text.count("<svg") == 5
    run_job(model, prompts, output, device="cpu", report=page, engine_factory=factory, batch_size=4)
    assert "9 rows before this run" in page.read_text()
    assert "<svg" not in page.read_text()
