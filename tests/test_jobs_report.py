"""The page that a job ends with: what passes carried and waited for, over time."""

import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from jobs_run_support import job, model, output
from jobs_support import ResidentEngine, prompt_rows, write_rows

from zinfer.jobs import UnusableInput, run_job
from zinfer.jobs.progress import Load
from zinfer.jobs.report import Moment, Panel, Timeline, draw, write_report
from zinfer.jobs.summary import JobSummary
from zinfer.offload.stats import RunStats

__all__ = ["model", "output"]  # fixtures
SUMMARY = JobSummary(9, 7, 2, 4, 50, 60, 75.0, 30.0, 20.0, 25.0, None, ("a <note>",))


def words(svg: str) -> list[str]:
    """The texts of a picture, in order."""
    return [str(each.text).strip() for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_has_plain_numbers_units_legends_and_the_prediction() -> None:
    speed = Panel("Speed <1>", "new tokens/s", {"generated": [0.0, None, 2_500_000.0]}, 2_000_000.0)
    shares = Panel("Use", "share", {"PCIe": [0.5, 0.25, None], "disk": [None, None, None]}, is_share=True)
    unknown = Panel("Nothing", "things", {"none": [None, None, None]})
    said = words(draw([1.0, 150.0, 300.0], [speed, shares, unknown]))
    for part in ("Speed <1>", "new tokens/s", "generated", "predicted", "2,000,000", "PCIe", "100%", "minutes", "5"):
        assert part in said
    assert not {"disk", "Nothing", "things"}.intersection(said)
    assert "hours" in words(draw([0.0, 9000.0], [Panel("Speed", "tokens", {"generated": [1.0, 2.0]})]))


def test_the_page_shows_what_happened_between_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def moment(at_s: float, load: Load, passes: int, link_share: float, disk_wait_s: float) -> Moment:
        waits = {"disk": disk_wait_s, "compute": 9.0}
        return Moment(at_s, load, RunStats(passes=passes, link_share=link_share, span_s=4.0, stall_s=waits))

    moments = [
        moment(0.0, Load(0, 0, 0, 0), 0, 0.0, 0.0),
        moment(2.0, Load(3, 600, 20, 5), 3, 0.25, 0.5),
        moment(4.0, Load(3, 600, 20, 5, 7), 3, 0.75, 0.5),
    ]
    drawn: list[Panel] = []

    def keep(times_s: list[float], panels: list[Panel]) -> str:
        assert times_s == [2.0, 4.0]
        drawn.extend(panels)
        return draw(times_s, panels)

    monkeypatch.setattr("zinfer.jobs.report.draw", keep)
    write_report(tmp_path / "page.html", replace(SUMMARY, predicted_tokens_per_s=12.0), moments)
    text = (tmp_path / "page.html").read_text()
    assert "a &lt;note&gt;" in text
    assert "<tr><td>tokens<td>50 in, 60 out</tr>" in text
    assert text.count("<svg") == 1
    assert {panel.title: panel.lines for panel in drawn} == {
        "Tokens computed by a pass": {"computed": [200.0, None]},  # no pass ended in the second half
        "Speed": {"generated": [10.0, 0.0]},
        "Use of the measured rates": {"PCIe": [0.5, 1.0], "disk": [None, None]},  # the disk's rate is not known
        "Compute waited": {"for the disk": [0.25, 0.0]},
        "Running": {"running": [5.0, 5.0]},
        "Swapped out": {"pages": [0.0, 7.0]},
    }
    assert [panel.predicted for panel in drawn if panel.title == "Speed"] == [12.0]


def test_a_report_without_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.jobs.request.find_spec", lambda name: None)
    with pytest.raises(UnusableInput, match=r"a report needs matplotlib; run `pip install '\.\[report\]'`"):
        run_job("none", tmp_path / "in.jsonl", tmp_path / "out.jsonl", report=tmp_path / "page.html")


def test_a_timeline_takes_moments_until_it_is_closed_and_thins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.jobs.report._MOST_MOMENTS", 8)
    timeline = Timeline(lambda: RunStats(passes=3), lambda: Load(1, 2, 3), interval_s=0.005)
    time.sleep(0.3)
    moments = timeline.close()
    assert timeline.close() == moments
    assert 2 <= len(moments) <= 9
    assert all(moment.stats.passes == 3 and moment.load == Load(1, 2, 3) for moment in moments)
    times_s = [moment.at_s for moment in moments]
    assert times_s == sorted(times_s)


def test_a_timeline_that_cannot_look_says_so_when_it_is_closed() -> None:
    def broken() -> Load:
        raise RuntimeError("gone")

    timeline = Timeline(RunStats, broken, interval_s=0.001)
    with pytest.raises(RuntimeError, match="gone"):
        timeline.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_job_writes_its_page(model: Path, tmp_path: Path, output: Path, is_padded: bool) -> None:
    page = tmp_path / "page.html"
    factory = ResidentEngine if is_padded else None
    prompts = write_rows(tmp_path / "in.jsonl", prompt_rows(9))
    job(model, prompts, output, engine_factory=factory, report=page)
    text = page.read_text()
    assert "<tr><td>rows<td>9 done, 0 failed</tr>" in text
    assert text.count("<svg") == 1
    job(model, prompts, output, engine_factory=factory, report=page)
    assert "9 rows before this run" in page.read_text()
    assert "<svg" not in page.read_text()
