"""`zinfer families`: the tested models, and the features that each supports."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from zinfer.cli.ending import exit_on_error, importing

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    "family",
    "classes",
    "streams",
    "continuous batching",
    "fused kernels",
    "tensor parallel",
    "expert parallel",
)


def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as in docs/families.md.")] = False,
) -> None:
    """List the tested model families, and the features that each supports."""
    with importing():
        import zinfer.model.families  # noqa: F401

    with exit_on_error():
        if markdown:
            print(families_markdown(), end="")
        else:
            Console().print(families_table())


def families_table() -> "Table":
    """Return a table with a row per family and a line per class; it fits 80 columns."""
    from rich.table import Table

    from zinfer.model.families import FAMILIES

    table = Table(title="families of models that are tested; all stream", title_justify="left", show_lines=True)
    table.add_column("family")
    table.add_column("classes", no_wrap=True)
    table.add_column("what else they can use")
    for family in FAMILIES:
        parts = {
            "continuous batching": family.is_batched,
            "tensor parallel": family.is_tensor_parallel,
            "expert parallel": family.is_expert_parallel,
        }
        uses = [*(part for part, is_used in parts.items() if is_used), *family.fused]
        table.add_row(family.name, "\n".join(family.classes), "; ".join(uses))
    return table


def families_markdown() -> str:
    """Return the table in Markdown, as in docs/families.md."""
    from zinfer.model.families import FAMILIES

    rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
    for family in FAMILIES:
        can = (family.is_batched, family.is_tensor_parallel, family.is_expert_parallel)
        batched, *parallel = ("yes" if each else "" for each in can)
        rows.append((family.name, ", ".join(family.classes), "yes", batched, "; ".join(family.fused), *parallel))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
