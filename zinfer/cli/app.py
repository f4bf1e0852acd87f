"""The root of the command line and its subcommands.

Heavy packages are imported inside the commands, so that `--help` and `--version` answer at once.
"""

import os
from collections.abc import MutableMapping
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

_SPINS: Final = ("GOMP_SPINCOUNT", "1000")

app = typer.Typer(
    help="Runs models that do not fit in GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
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


def spare_cores(environment: MutableMapping[str, str]) -> None:
    """Let torch's threads sleep soon while they wait for each other, unless the environment says how they wait.

    By default they spin for a millisecond in each operator. Where other programs take some of the cores, threads spin
    for one that is not running: 40 times as long for small operators, on two cores of which one was free. On idle cores
    a thousand spins are as fast. Must be called before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(*_SPINS)


def main() -> NoReturn:
    """Entry point of the console script."""
    spare_cores(os.environ)
    protect_streams()
    app()
    raise AssertionError("typer ends the process itself")
