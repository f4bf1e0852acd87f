"""The report of a job: charts of its progress over time, as one self-contained HTML page.

A separate thread samples the counters, so that computing does not wait. matplotlib draws the charts (extra ``report``).
"""

import io
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from zinfer.jobs.progress import Load
from zinfer.jobs.summary import JobSummary, causes, summary_rows
from zinfer.nvme.pool import start_thread
from zinfer.nvme.whole_file import replace_file
from zinfer.offload.stats import RunStats

_MOST_MOMENTS: Final = 600
_INTERVAL_S: Final = 0.25
_STYLE: Final = {"svg.fonttype": "none", "svg.hashsalt": "zinfer", "font.size": 9}
_UNITS: Final = ((7200, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))

_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>zinfer run: {{ output }}</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td { padding: .2em 1em .2em 0; border-bottom: 1px solid #ddd }
svg { width: 100%; height: auto }
</style>
<h1>{{ output }}</h1>
{% for section in sections %}<table>{% for name, value in section %}<tr><td>{{ name }}<td>{{ value }}</tr>
{% endfor %}</table>
{% endfor %}{% for note in notes %}<p>{{ note }}</p>
{% endfor %}{{ picture }}
</html>
"""


class Moment(NamedTuple):
    """The counters at one time, in seconds since the first."""

    at_s: float
    load: Load
    stats: RunStats


class Timeline:
    """Samples the counters on its own thread until closed. Long jobs get a longer interval, not more samples.

    Args:
        stats, load: return the counters; called by the timeline's thread.
    """

    def __init__(
        self, stats: Callable[[], RunStats], load: Callable[[], Load], interval_s: float = _INTERVAL_S
    ) -> None:
        self._stats, self._load = stats, load
        self._interval_s, self._began_s = interval_s, time.monotonic()
        self._moments: list[Moment] = []
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = start_thread("zinfer-timeline", self._watch, self._fail)

    def close(self) -> list[Moment]:
        """Stop sampling and return all moments; raises the thread's exception, if any. May be called again."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._take()
        if self._failure is not None:
            raise self._failure
        return self._moments

    def _watch(self) -> None:
        self._take()
        while not self._ended.wait(self._interval_s):
            self._take()
            if len(self._moments) >= _MOST_MOMENTS:
                self._moments = self._moments[::2]
                self._interval_s *= 2

    def _fail(self, failure: BaseException) -> None:
        """Let `close` raise an error."""
        self._failure = failure

    def _take(self) -> None:
        stats, load = self._stats(), self._load()
        self._moments.append(Moment(time.monotonic() - self._began_s, load, stats))


def write_report(path: Path, summary: JobSummary, moments: Sequence[Moment]) -> None:
    """Write the whole page atomically.

    Args:
        path: path of the HTML file.
        moments: samples of this run; with fewer than two there is no chart.
    """
    picture = ""
    if len(moments) > 1:
        picture = draw([moment.at_s for moment in moments[1:]], _panels(moments, summary))
    page = Environment(autoescape=True).from_string(_PAGE)
    sections = summary_rows(summary)
    replace_file(
        path, page.render(output=summary.output, sections=sections, notes=summary.notes, picture=Markup(picture))
    )


class Panel(NamedTuple):
    """A chart of quantities with one unit over time.

    Attributes:
        lines: values by name; None where unknown.
        predicted: drawn as a horizontal line; 0: unknown.
        is_share: values are fractions of 1, shown in percent.
    """

    title: str
    unit: str
    lines: dict[str, list[float | None]]
    predicted: float = 0.0
    is_share: bool = False


def draw(times_s: Sequence[float], panels: Sequence[Panel]) -> str:
    """Draw the panels below each other over one time axis, as an SVG element; panels without values are left out.

    Args:
        times_s: times of the values, increasing.
    """
    import matplotlib
    from matplotlib.figure import Figure

    known = [panel for panel in panels if any(value is not None for line in panel.lines.values() for value in line)]
    _, unit_s, unit = next(each for each in _UNITS if times_s[-1] >= each[0])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 1.9 * len(known) + 0.4), layout="constrained")
        column = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(column, known, strict=True):
            _draw_panel(axes, [at_s / unit_s for at_s in times_s], panel)
        column[-1].set_xlabel(unit)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def _draw_panel(axes: Any, times: Sequence[float], panel: Panel) -> None:
    for name, values in panel.lines.items():
        if known := [(at, value) for at, value in zip(times, values, strict=True) if value is not None]:
            axes.plot(*zip(*known, strict=True), label=name, linewidth=1.2)
    if panel.predicted:
        axes.axhline(panel.predicted, label="predicted", color="#888", linestyle="--", linewidth=1)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_ylabel(panel.unit)
    axes.set_ylim(bottom=0, top=1.05 if panel.is_share else None)
    axes.yaxis.set_major_formatter("{x:.0%}" if panel.is_share else "{x:,.10g}")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.grid(color="#eee")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _panels(moments: Sequence[Moment], summary: JobSummary) -> list[Panel]:
    """Return the charts; each value covers the interval between two moments."""
    last, loads = moments[-1].stats, [moment.load for moment in moments[1:]]

    def rates(count: Callable[[Moment], float | None]) -> list[float | None]:
        """Return a counter's increase per second; None where unknown."""
        ends = [(count(before), count(after), after.at_s - before.at_s) for before, after in pairwise(moments)]
        return [None if a is None or b is None or seconds <= 0 else (b - a) / seconds for a, b, seconds in ends]

    def busy_s(share: str) -> list[float | None]:
        """Return the fraction of time that the moved bytes take at the measured rate."""

        def seconds(moment: Moment) -> float | None:
            found: float | None = getattr(moment.stats, share)
            return None if found is None else found * moment.stats.span_s

        return rates(seconds)

    computed: list[float | None] = [
        (after.load.num_tokens - before.load.num_tokens) / passes
        if (passes := after.stats.passes - before.stats.passes)
        else None
        for before, after in pairwise(moments)
    ]
    made = "generated" if summary.num_output_tokens else "encoded"
    speed = {made: rates(lambda moment: moment.load.num_new_tokens)}
    words = causes(summary.device)
    waits = {
        f"for {what}": rates(lambda moment, cause=cause: moment.stats.stall_s.get(cause))  # type: ignore[misc]
        for cause, what in words.items()
        if cause in last.stall_s
    }
    panels = [
        Panel("Tokens computed by a pass", "tokens", {"computed": computed}),
        Panel("Speed", "tokens/s", speed, summary.predicted_tokens_per_s),
        Panel(
            "Use of the measured rates",
            "share",
            {words["link"]: busy_s("link_share"), "disk": busy_s("disk_share")},
            is_share=True,
        ),
        Panel("Compute waited", "share of time", waits, is_share=True),
        Panel("Running", "sequences", {"running": [float(load.num_running) for load in loads]}),
    ]
    if any(load.num_swapped_pages for load in loads):
        pages: list[float | None] = [float(load.num_swapped_pages) for load in loads]
        panels.append(Panel("Swapped out", "pages of KV cache", {"pages": pages}))
    return panels
