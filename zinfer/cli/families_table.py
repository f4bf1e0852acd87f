"""The families as a table for people, and as the one in docs/families.md."""

from collections.abc import Iterable

from rich.table import Table

from zinfer.model.families import FAMILIES, Family

_COLUMNS = ("family", "classes", "streams", "continuous batching", "fused kernels", "tensor parallel")


def families_table() -> Table:
    """One row a family, a class a line: 80 columns cut no word."""
    table = Table(title="families of models that are tested; all stream", title_justify="left", show_lines=True)
    table.add_column("family")
    table.add_column("classes", no_wrap=True)
    table.add_column("what else they can use")
    for family in FAMILIES:
        table.add_row(family.name, "\n".join(family.classes), _uses(family))
    return table


def families_markdown() -> str:
    """Return the same table in Markdown, as docs/families.md has it."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, FAMILIES)]
    return "".join(_line(row) for row in rows)


def _cells(family: Family) -> tuple[str, ...]:
    return (
        family.name,
        ", ".join(family.classes),
        "yes",
        "yes" if family.is_batched else "",
        "; ".join(family.fused),
        "yes" if family.is_tensor_parallel else "",
    )


def _uses(family: Family) -> str:
    parts = {"continuous batching": family.is_batched, "tensor parallel": family.is_tensor_parallel}
    return "; ".join([*(part for part, is_used in parts.items() if is_used), *family.fused])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
