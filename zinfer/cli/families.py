"""`zinfer families`: which models are tested, and what each can use."""

from typing import Annotated

import typer
from rich.console import Console


def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the README has it.")] = False,
) -> None:
    """List the families of models that are tested, and which parts of zinfer each can use."""
    from zinfer.families_table import families_markdown, families_table

    if markdown:
        print(families_markdown(), end="")
    else:
        Console().print(families_table())
