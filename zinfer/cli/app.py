"""The root of the command line: a table of its commands, whose modules are imported when they run.

So `--help` and `--version` answer at once. Heavy packages are imported inside the commands, for the help of each.
"""

import atexit
import os
import sys
import threading
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from zinfer import __version__
from zinfer.display import protect_streams

_COMMANDS: Final = {
    "run": "Complete every row of a file. Run the command again to resume after an interruption.",
    "probe": "Measure this machine: the disk, host memory, PCIe and the device. Takes about half a minute.",
    "plan": "Predict memory, speed and the bottleneck of a batch or a job, and suggest how to make it faster.",
    "bench": "Measure a job with random weights: of the model only config.json is needed.",
    "serve": "Serve a model over HTTP with OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/models, with "
    "--files /v1/files and /v1/batches, and with --task embed only /v1/embeddings.",
    "chat": "Talk with a model in a terminal: one in a folder, which is loaded for this chat, or one of a server.",
    "warmup": "Compile the kernels that a model needs on this GPU, so that its first job does not wait for them.",
    "replica": "",
    "quantize": "Write a store: a checkpoint of quantized weights that streams from disk without conversion.",
    "families": "List the tested model families, and the features that each supports.",
}
"""What each does: the first paragraph of its function's docstring. Without words: hidden."""
_MODULES: Final = {"replica": "serve"}
"""Of commands that share another's module."""
_ALIASES: Final = {
    "gpu": "machine",
    "max-tokens": "max-new-tokens",
    "memory-cap": "max-device-memory",
    "new-tokens": "max-new-tokens",
}
"""Other spellings of options, of which --help shows one."""


class _Commands(TyperGroup):
    """The commands by their words alone; the one that runs is imported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=help, hidden=not help) for name, help in _COMMANDS.items()}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As plain text: the panels of rich take as long to import as all else."""
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, help in _COMMANDS.items() if help])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _imported(name), rest


def _imported(name: str) -> Any:
    """Return a command as typer makes it of its function."""
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    one.command(name)(getattr(import_module(f"zinfer.cli.{_MODULES.get(name, name)}"), name))
    return get_command(one)


app = typer.Typer(
    cls=_Commands,
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
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int) and "torch" in sys.modules and sys.getprofile() is None:
            _end_at_once(end.code)
        raise
    raise AssertionError("typer ends the process itself")


def _end_at_once(exit_code: int) -> NoReturn:
    """End the process after its threads and what `atexit` has, as Python does, but free none of its million objects.

    That would take half a second of processor time.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)
