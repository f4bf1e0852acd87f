"""The report of a job as one HTML page that needs nothing else, without any script."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from jinja2 import Environment
from markupsafe import Markup

from zinfer.jobs.plot import Line, plot
from zinfer.jobs.summary import JobSummary, summary_rows
from zinfer.jobs.timeline import Moment
from zinfer.nvme.whole_file import replace_file

_NUM_POINTS: Final = 300

_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>zinfer run: {{ output }}</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td { padding: .2em 1em .2em 0; border-bottom: 1px solid #ddd }
svg { width: 100%; margin: .5em 0 }
svg text { font: 11px ui-monospace, monospace }
svg text.title { font-weight: bold }
</style>
<h1>{{ output }}</h1>
<table>{% for name, value in rows %}<tr><td>{{ name }}<td>{{ value }}</tr>
{% endfor %}</table>
{% for note in notes %}<p>{{ note }}</p>
{% endfor %}
{% for picture in pictures %}{{ picture }}
{% endfor %}
</html>
"""


def write_run_page(path: Path, output: str, summary: JobSummary, moments: Sequence[Moment]) -> None:
    """Write the page as a whole.

    Args:
        path: of the HTML file.
        output: the job's, for the title.
        moments: of this run; without any there are no pictures.
    """
    pictures = [Markup(picture) for picture in _pictures(moments)] if len(moments) > 1 else []
    rows = [row for section in summary_rows(summary) for row in section]
    text = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(output=output, rows=rows, notes=summary.notes, pictures=pictures)
    )
    replace_file(path, text)


def _pictures(moments: Sequence[Moment]) -> list[str]:
    spans = [_Span(before, after) for before, after in pairwise(_thinned(moments))]
    times_s = [span.after.at_s for span in spans]
    generated = [span.a_second(span.after.load.num_new_tokens - span.before.load.num_new_tokens) for span in spans]
    used = [
        Line("link", [span.used(span.before.link_s, span.after.link_s) for span in spans]),
        Line("disk", [span.used(span.before.disk_s, span.after.disk_s) for span in spans]),
    ]
    waited = [
        Line(f"waits for {cause}", [span.used(span.before.stall_s[cause], span.after.stall_s[cause]) for span in spans])
        for cause in moments[-1].stall_s
        if cause != "compute"
    ]
    texts = [
        Line("running", [float(span.after.load.num_running) for span in spans]),
        Line("parked pages", [float(span.after.load.num_swapped_pages) for span in spans]),
    ]
    return [
        plot("tokens a pass", times_s, [Line("computed", [span.tokens_a_pass() for span in spans])]),
        plot("new tokens a second", times_s, [Line("generated", generated)]),
        plot("share of the measured rate", times_s, used, most=1.0),
        plot("share of the time that compute", times_s, waited, most=1.0),
        plot("texts", times_s, texts),
    ]


def _thinned(moments: Sequence[Moment]) -> Sequence[Moment]:
    """So few that each picture's points can be told apart, the last among them."""
    step = max(1, len(moments) // _NUM_POINTS)
    return [*moments[:-1:step], moments[-1]]


@dataclass(frozen=True)
class _Span:
    """What lies between two moments."""

    before: Moment
    after: Moment

    def a_second(self, amount: float) -> float | None:
        seconds = self.after.at_s - self.before.at_s
        return amount / seconds if seconds > 0 else None

    def used(self, first: float | None, last: float | None) -> float | None:
        """Seconds of some resource as a share of those that went by."""
        return None if first is None or last is None else self.a_second(last - first)

    def tokens_a_pass(self) -> float | None:
        passes = self.after.passes - self.before.passes
        return (self.after.load.num_tokens - self.before.load.num_tokens) / passes if passes else None
