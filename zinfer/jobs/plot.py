"""Lines over time as an SVG picture, for pages without scripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from jinja2 import Environment

_WIDTH: Final = 900
_HEIGHT: Final = 150
_LEFT: Final = 70
_TOP: Final = 24
_COLORS: Final = ("#3b7ea1", "#e08e45", "#5a9b5a", "#a15a8f", "#888888")

_SVG: Final = """<svg viewBox="0 0 {{ right + 20 }} {{ bottom + 30 }}" role="img" aria-label="{{ title }}">
<text x="{{ left }}" y="14" class="title">{{ title }}</text>
{% for line in lines %}<text x="{{ line.name_x }}" y="14" fill="{{ line.color }}">{{ line.name }}</text>
<polyline fill="none" stroke="{{ line.color }}" stroke-width="1.5" points="{{ line.points }}"/>
{% endfor %}
{% for tick in ticks %}<line x1="{{ left }}" x2="{{ right }}" y1="{{ tick.y }}" y2="{{ tick.y }}" stroke="#ddd"/>
<text x="{{ left - 8 }}" y="{{ tick.y + 4 }}" text-anchor="end">{{ tick.label }}</text>
{% endfor %}
<text x="{{ left }}" y="{{ bottom + 18 }}">0 s</text>
<text x="{{ right }}" y="{{ bottom + 18 }}" text-anchor="end">{{ end }}</text>
</svg>"""


@dataclass(frozen=True)
class Line:
    """A quantity at the times of a plot; None where it is not known."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class _Drawn:
    name: str
    name_x: int
    color: str
    points: str


@dataclass(frozen=True)
class _Tick:
    y: float
    label: str


def plot(title: str, times_s: Sequence[float], lines: Sequence[Line], most: float | None = None) -> str:
    """The SVG element.

    Args:
        times_s: of the values, rising.
        lines: as many values as times; at most as many as there are colours.
        most: the top of the scale, where greater values are drawn too; None: the greatest value.
    """
    assert len(lines) <= len(_COLORS)
    known = [value for line in lines for value in line.values if value is not None]
    top = most or max(known, default=0.0) or 1.0
    end_s = times_s[-1] if times_s else 0.0

    def point(at_s: float, value: float) -> str:
        y = _TOP + _HEIGHT * (1 - min(value, top) / top)
        return f"{_LEFT + _WIDTH * at_s / (end_s or 1.0):.1f},{y:.1f}"

    def drawn(number: int, line: Line) -> _Drawn:
        known = ((at_s, value) for at_s, value in zip(times_s, line.values, strict=True) if value is not None)
        points = " ".join(point(at_s, value) for at_s, value in known)
        return _Drawn(line.name, _LEFT + 380 + 130 * number, _COLORS[number], points)

    return (
        Environment(autoescape=True)
        .from_string(_SVG)
        .render(
            title=title,
            lines=[drawn(number, line) for number, line in enumerate(lines)],
            ticks=[_Tick(_TOP + _HEIGHT * (1 - share), f"{top * share:,.4g}") for share in (0.0, 0.5, 1.0)],
            end=f"{end_s:,.0f} s",
            left=_LEFT,
            right=_LEFT + _WIDTH,
            bottom=_TOP + _HEIGHT,
        )
    )
