"""The families as a table for people, and as the one in the README."""

from collections.abc import Iterable

from rich.table import Table

from zinfer.families import FAMILIES, Family

_COLUMNS = ("family", "classes", "streams", "continuous batching", "fused kernels", "tensor parallel")


def families_table() -> Table:
    """One row a family."""
    table = Table(title="families of models that are tested", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column)
    for family in FAMILIES:
        table.add_row(*_cells(family))
    return table


def families_markdown() -> str:
    """The same, as the README has it."""
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


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
