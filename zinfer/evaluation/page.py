"""The report as one HTML page that needs nothing else, without any script; and its worst rows for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment
from rich.table import Table

from zinfer.evaluation.compare import Agreement
from zinfer.evaluation.weight_error import MatrixError
from zinfer.nvme.whole_file import replace_file
from zinfer.units import human_bytes

_NUM_WORST: Final = 10
_BAR_HEIGHT: Final = 14
_BAR_WIDTH: Final = 520
_NAME_WIDTH: Final = 360

_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>zinfer quantize: {{ store }}</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: .2em 1em; text-align: left; border-bottom: 1px solid #ddd }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
svg text { font: 11px ui-monospace, monospace }
</style>
<h1>{{ store }}</h1>
<p>{{ errors|length }} quantized matrices, {{ full }} in full, {{ packed }} stored
({{ "%.2f"|format(ratio) }} times smaller).
Errors are relative: the norm of what rounding changed over the norm of the weight.</p>
{% if agreement %}
<h2>What the model says</h2>
<table>
<tr><th>prompts<th class="n">tokens<th class="n">log-likelihood a token, full
<th class="n">quantized<th class="n">change<th class="n">perplexity
<th class="n">equal greedy tokens</tr>
<tr><td>{{ agreement.num_prompts }}<td class="n">{{ agreement.num_tokens }}
<td class="n">{{ "%.4f"|format(agreement.full_log_likelihood) }}
<td class="n">{{ "%.4f"|format(agreement.quantized_log_likelihood) }}
<td class="n">{{ "%+.4f"|format(agreement.change) }}
<td class="n">x {{ "%.4f"|format(agreement.perplexity_ratio) }}
<td class="n">{{ "%.1f"|format(100 * agreement.equal_tokens) }} % of {{ agreement.num_new_tokens }} a prompt</tr>
</table>
{% endif %}
<h2>The worst</h2>
<table>
<tr><th>matrix<th>format<th class="n">relative error<th class="n">stored</tr>
{% for each in worst %}<tr><td>{{ each.parameter }}<td>{{ formats[loop.index0] }}
<td class="n">{{ "%.5f"|format(each.relative_error) }}<td class="n">{{ sizes[loop.index0] }}</tr>
{% endfor %}</table>
<h2>Error per layer</h2>
<svg width="{{ width }}" height="{{ bars|length * line }}" role="img" aria-label="relative error of each matrix">
{% for bar in bars %}<g transform="translate(0 {{ loop.index0 * line }})">
<text x="{{ names - 8 }}" y="{{ line - 4 }}" text-anchor="end">{{ bar.name }}</text>
<rect x="{{ names }}" y="2" width="{{ "%.1f"|format(bar.width) }}" height="{{ line - 4 }}" fill="{{ bar.color }}"/>
<text x="{{ names + bar.width + 6 }}" y="{{ line - 4 }}">{{ "%.5f"|format(bar.error) }}</text></g>
{% endfor %}</svg>
</html>
"""


@dataclass(frozen=True)
class _Bar:
    name: str
    error: float
    width: float
    color: str


def write_page(path: Path, store: str, errors: Sequence[MatrixError], agreement: Agreement | None) -> None:
    """Write the page as a whole.

    Args:
        path: of the HTML file.
        store: what was measured, for the title.
        errors: of all quantized matrices.
        agreement: None where no prompts were given.

    Raises:
        OSError: it cannot be written.
    """
    worst = worst_first(errors)[:_NUM_WORST]
    full, packed = sum(each.full_bytes for each in errors), sum(each.nbytes for each in errors)
    text = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            store=store,
            errors=errors,
            agreement=agreement,
            full=human_bytes(full),
            packed=human_bytes(packed),
            ratio=full / packed if packed else 1.0,
            worst=worst,
            formats=[format_name(each) for each in worst],
            sizes=[human_bytes(each.nbytes) for each in worst],
            bars=_bars(errors),
            line=_BAR_HEIGHT,
            names=_NAME_WIDTH,
            width=_NAME_WIDTH + _BAR_WIDTH + 80,
        )
    )
    replace_file(path, text)


def error_table(errors: Sequence[MatrixError], agreement: Agreement | None) -> Table:
    """The worst matrices, and what has changed in the model's texts, for a terminal."""
    table = Table(title="what quantizing has cost", title_justify="left")
    for column in ("matrix", "format", "relative error"):
        table.add_column(column)
    for each in worst_first(errors)[:_NUM_WORST]:
        table.add_row(each.parameter, format_name(each), f"{each.relative_error:.5f}")
    if agreement is not None:
        table.add_section()
        table.add_row("log-likelihood a token", "", f"{agreement.full_log_likelihood:.4f} {agreement.change:+.4f}")
        table.add_row("equal greedy tokens", "", f"{100 * agreement.equal_tokens:.1f} %")
    return table


def worst_first(errors: Sequence[MatrixError]) -> list[MatrixError]:
    """The matrices, those with the largest relative error first."""
    return sorted(errors, key=lambda each: -each.relative_error)


def format_name(error: MatrixError) -> str:
    """A format in words, such as "INT4, groups of 64"."""
    format = error.format
    kind = "FP8" if format.is_float else f"INT{format.bits}"
    groups = "" if format.group_size is None else f", groups of {format.group_size}"
    columns = ", columns scaled" if format.scales_columns else ""
    return f"{kind}{'' if format.symmetric else ' asymmetric'}{groups}{columns}"


def _bars(errors: Sequence[MatrixError]) -> list[_Bar]:
    """In the model's order; layers take turns in colour."""
    largest = max((each.relative_error for each in errors), default=0.0) or 1.0
    return [
        _Bar(
            each.parameter,
            each.relative_error,
            each.relative_error / largest * _BAR_WIDTH,
            "#3b7ea1" if (each.layer or 0) % 2 else "#e08e45",
        )
        for each in errors
    ]
