"""The root of the command line and its subcommands.

Heavy packages are imported inside the commands, so that `--help` and `--version` answer at once.
"""

from typing import Annotated, Final, NoReturn

import typer

from zinfer import __version__
from zinfer.cli.bench import bench
from zinfer.cli.chat import chat
from zinfer.cli.ending import protect_streams
from zinfer.cli.families import families
from zinfer.cli.plan import plan
from zinfer.cli.probe import probe
from zinfer.cli.quantize import quantize
from zinfer.cli.run import run
from zinfer.cli.serve import replica, serve
from zinfer.cli.warmup import warmup

_ALIASES: Final = {
    "gpu": "machine",
    "max-tokens": "max-new-tokens",
    "memory-cap": "max-device-memory",
    "new-tokens": "max-new-tokens",
}
"""Other spellings of options, of which --help shows one."""

app = typer.Typer(
    help="Runs models that do not fit in GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: _ALIASES.get(name, name),
    },
)
app.command()(run)
app.command()(probe)
app.command()(plan)
app.command()(bench)
app.command()(serve)
app.command()(chat)
app.command()(warmup)
app.command(hidden=True)(replica)
app.command()(quantize)
app.command()(families)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zinfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Entry point of the console script."""
    protect_streams()
    app()
    raise AssertionError("typer ends the process itself")
