"""The report as one self-contained HTML page without scripts; and its worst rows for a terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment
from rich.table import Table

from zinfer.evaluation.compare import Agreement
from zinfer.evaluation.weight_error import MatrixError
from zinfer.nvme.whole_file import replace_file
from zinfer.units import human_bytes

_NUM_WORST: Final = 10

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
<p>{{ errors|length }} quantized matrices, {{ full|human_bytes }} in full, {{ packed|human_bytes }} stored
({{ "%.2f"|format(full / packed if packed else 1) }} times smaller).
Errors are relative: the norm of the rounding error over the norm of the weight.</p>
{% if agreement %}
<h2>Output of the model</h2>
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
<h2>Largest errors</h2>
<table>
<tr><th>matrix<th>format<th class="n">relative error<th class="n">stored</tr>
{% for each in worst %}<tr><td>{{ each.parameter }}<td>{{ each|format_name }}
<td class="n">{{ "%.5f"|format(each.relative_error) }}<td class="n">{{ each.nbytes|human_bytes }}</tr>
{% endfor %}</table>
<h2>Error per layer</h2>
{% set line, names, most = 14, 360, 520 %}
<svg width="{{ names + most + 80 }}" height="{{ errors|length * line }}" role="img"
 aria-label="relative error of each matrix">
{% for each in errors %}{% set width = most * each.relative_error / largest %}
<g transform="translate(0 {{ loop.index0 * line }})">
<text x="{{ names - 8 }}" y="{{ line - 4 }}" text-anchor="end">{{ each.parameter }}</text>
<rect x="{{ names }}" y="2" width="{{ "%.1f"|format(width) }}" height="{{ line - 4 }}"
 fill="{{ "#3b7ea1" if (each.layer or 0) % 2 else "#e08e45" }}"/>
<text x="{{ names + width + 6 }}" y="{{ line - 4 }}">{{ "%.5f"|format(each.relative_error) }}</text></g>
{% endfor %}</svg>
</html>
"""


def write_page(path: Path, store: str, errors: Sequence[MatrixError], agreement: Agreement | None) -> None:
    """Write the whole page atomically.

    Args:
        path: path of the HTML file.
        store: name of the store, for the title.
        errors: errors of all quantized matrices, in the model's order.
        agreement: None if no prompts were given.

    Raises:
        OSError: it cannot be written.
    """
    environment = Environment(autoescape=True)
    environment.filters |= {"human_bytes": human_bytes, "format_name": format_name}
    full, packed = sum(each.full_bytes for each in errors), sum(each.nbytes for each in errors)
    text = environment.from_string(_PAGE).render(
        store=store,
        errors=errors,
        agreement=agreement,
        full=full,
        packed=packed,
        worst=worst_first(errors)[:_NUM_WORST],
        largest=max((each.relative_error for each in errors), default=0.0) or 1.0,
    )
    replace_file(path, text)


def error_table(errors: Sequence[MatrixError], agreement: Agreement | None) -> Table:
    """Return a table of the largest errors and of the changes in the model's output, for a terminal."""
    table = Table("matrix", "format", "relative error", title="quantization errors", title_justify="left")
    for each in worst_first(errors)[:_NUM_WORST]:
        table.add_row(each.parameter, format_name(each), f"{each.relative_error:.5f}")
    if agreement is not None:
        table.add_section()
        table.add_row("log-likelihood a token", "", f"{agreement.full_log_likelihood:.4f} {agreement.change:+.4f}")
        table.add_row("equal greedy tokens", "", f"{100 * agreement.equal_tokens:.1f} %")
    return table


def worst_first(errors: Sequence[MatrixError]) -> list[MatrixError]:
    """Sort the matrices by relative error, largest first."""
    return sorted(errors, key=lambda each: -each.relative_error)


def format_name(error: MatrixError) -> str:
    """Describe a format, such as "INT4, groups of 64"."""
    format = error.format
    kind = f"{'FP' if format.is_float else 'INT'}{format.bits}"
    groups = "" if format.group_size is None else f", groups of {format.group_size}"
    columns = ", columns scaled" if format.scales_columns else ""
    return f"{kind}{'' if format.symmetric else ' asymmetric'}{groups}{columns}"
