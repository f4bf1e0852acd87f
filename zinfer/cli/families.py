"""`zinfer families`: which models are tested, and what each can use."""

from typing import Annotated

import typer
from rich.console import Console

from zinfer.cli.ending import failing_disk_explained, importing


def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/families.md has it.")] = False,
) -> None:
    """List the families of models that are tested, and which parts of zinfer each can use."""
    with importing():
        from zinfer.cli.families_table import families_markdown, families_table

    with failing_disk_explained():
        if markdown:
            print(families_markdown(), end="")
            return
        Console().print(families_table())
