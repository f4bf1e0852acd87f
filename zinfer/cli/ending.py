"""How a command ends: an exit code, and words on stderr that say what to do next."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Final, NoReturn

import typer

from zinfer.errors import CheckpointError, ConfigError, JobError, PlanError
from zinfer.jobs.failure import Interrupted, UnusableInput

EXIT_STOPPED: Final = 1
EXIT_UNUSABLE: Final = 2


class Device(StrEnum):
    """Where the layers compute."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


@contextmanager
def unusable_input_explained() -> Iterator[None]:
    """Turns what is wrong with a checkpoint, configuration, budget or file of rows into a message and exit code 2."""
    try:
        yield
    except (ConfigError, CheckpointError, PlanError, UnusableInput) as error:
        say(f"error: {error}")
        raise typer.Exit(EXIT_UNUSABLE) from None


@contextmanager
def failing_disk_explained() -> Iterator[None]:
    """As `unusable_input_explained`, for commands that read or write: an error of the system is exit code 1."""
    try:
        with unusable_input_explained():
            yield
    except (OSError, JobError) as error:
        say(f"error: {error}")
        raise typer.Exit(EXIT_STOPPED) from None


@contextmanager
def interruption_explained(kept: str) -> Iterator[None]:
    """Turns a signal into an exit code, and words on what is kept."""
    try:
        yield
    except Interrupted as interruption:
        name = signal.Signals(interruption.signal_number).name
        say(f"{name}: stopped. {kept}; run the same command again to go on.")
        raise typer.Exit(interruption.exit_code) from None


def say(text: str) -> None:
    """A message of the program itself, on stderr."""
    print(f"zinfer: {text}", file=sys.stderr)


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Interrupted` once; the second one ends the process at once."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(number)

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
