"""`zinfer families`: which models are tested, and what each can use."""

import os
from typing import Annotated, Final

import typer
from rich.console import Console

from zinfer.cli.ending import failing_disk_explained, importing

_MOST_COLUMNS: Final = 1000


def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the README has it.")] = False,
) -> None:
    """List the families of models that are tested, and which parts of zinfer each can use."""
    with importing():
        from zinfer.families_table import families_markdown, families_table

    with failing_disk_explained():
        if markdown:
            print(families_markdown(), end="")
            return
        table, console = families_table(), Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:  # in a pipe nothing is cut
            console = Console(width=Console(width=_MOST_COLUMNS).measure(table).maximum)
        console.print(table)
