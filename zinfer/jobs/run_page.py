"""The report of a job as one HTML page that needs nothing else; matplotlib draws its pictures (extra ``report``)."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment
from markupsafe import Markup

from zinfer.jobs.summary import JobSummary, summary_rows
from zinfer.jobs.timeline import Moment
from zinfer.nvme.whole_file import replace_file

_NUM_POINTS: Final = 300
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


def write_run_page(path: Path, output: str, summary: JobSummary, moments: Sequence[Moment]) -> None:
    """Write the page as a whole.

    Args:
        path: of the HTML file.
        output: the job's, for the title.
        moments: of this run; without two there is no picture.
    """
    picture = ""
    if len(moments) > 1:
        spans = [_Span(before, after) for before, after in pairwise(_thinned(moments))]
        picture = draw([span.after.at_s for span in spans], _panels(spans, summary.predicted_tokens_per_s))
    page = Environment(autoescape=True).from_string(_PAGE)
    sections = summary_rows(summary)
    replace_file(path, page.render(output=output, sections=sections, notes=summary.notes, picture=Markup(picture)))


@dataclass(frozen=True)
class Panel:
    """Quantities of one unit over time.

    Attributes:
        lines: values by name; None where one is not known.
        predicted: drawn across; 0: not known.
        is_share: of 1, shown in percent.
    """

    title: str
    unit: str
    lines: dict[str, list[float | None]]
    predicted: float = 0.0
    is_share: bool = field(default=False, kw_only=True)

    @property
    def is_known(self) -> bool:
        return any(value is not None for values in self.lines.values() for value in values)


def draw(times_s: Sequence[float], panels: Sequence[Panel]) -> str:
    """Return panels below each other over one axis of time, as an SVG element; those of which nothing is known are
    left out.

    Args:
        times_s: of the values, rising.
    """
    import matplotlib
    from matplotlib.figure import Figure

    known = [panel for panel in panels if panel.is_known]
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
    axes.yaxis.set_major_formatter(_percent if panel.is_share else _plain)
    axes.xaxis.set_major_formatter(_plain)
    axes.grid(color="#eee")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _plain(value: float, _place: int) -> str:
    return f"{value:,.10g}"


def _percent(value: float, _place: int) -> str:
    return f"{value:.0%}"


def _panels(spans: Sequence["_Span"], predicted_tokens_per_s: float) -> list[Panel]:
    def rates(count: Callable[[Moment], float | None]) -> list[float | None]:
        return [span.a_second(count) for span in spans]

    causes = {"disk": "the disk", "host": "copies in host memory", "link": "PCIe"}
    waits = {f"for {what}": cause for cause, what in causes.items() if cause in spans[-1].after.stall_s}
    pages = [float(span.after.load.num_swapped_pages) for span in spans]
    panels = [
        Panel("Tokens computed by a pass", "tokens", {"computed": [span.tokens_a_pass() for span in spans]}),
        Panel(
            "Speed",
            "new tokens/s",
            {"generated": rates(lambda moment: moment.load.num_new_tokens)},
            predicted_tokens_per_s,
        ),
        Panel(
            "Use of the measured rates",
            "share",
            {"PCIe": rates(lambda moment: moment.link_s), "disk": rates(lambda moment: moment.disk_s)},
            is_share=True,
        ),
        Panel(
            "Compute waited",
            "share of time",
            {name: rates(lambda moment, cause=cause: moment.stall_s[cause]) for name, cause in waits.items()},  # type: ignore[misc]
            is_share=True,
        ),
        Panel("Running", "sequences", {"running": [float(span.after.load.num_running) for span in spans]}),
    ]
    return [*panels, Panel("Swapped out", "pages of KV cache", {"pages": [*pages]})] if any(pages) else panels


def _thinned(moments: Sequence[Moment]) -> Sequence[Moment]:
    """So few that a picture's points can be told apart, the last among them."""
    step = max(1, len(moments) // _NUM_POINTS)
    return [*moments[:-1:step], moments[-1]]


@dataclass(frozen=True)
class _Span:
    """The time between two moments."""

    before: Moment
    after: Moment

    def a_second(self, count: Callable[[Moment], float | None]) -> float | None:
        """By how much a counter rose in a second; None where it is not known."""
        seconds, first, last = self.after.at_s - self.before.at_s, count(self.before), count(self.after)
        return None if first is None or last is None or seconds <= 0 else (last - first) / seconds

    def tokens_a_pass(self) -> float | None:
        passes = self.after.passes - self.before.passes
        return (self.after.load.num_tokens - self.before.load.num_tokens) / passes if passes else None
