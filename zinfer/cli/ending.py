"""How a command ends: an exit code, and words on stderr that say what to do next."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

import typer

from zinfer.errors import CheckpointError, ConfigError, PlanError

EXIT_STOPPED: Final = 1
EXIT_UNUSABLE: Final = 2


class Device(StrEnum):
    """Where the layers compute."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


@contextmanager
def unusable_input_explained() -> Iterator[None]:
    """Turns what is wrong with a checkpoint, configuration or budget into a message and exit code 2."""
    try:
        yield
    except (ConfigError, CheckpointError, PlanError) as error:
        say(f"error: {error}")
        raise typer.Exit(EXIT_UNUSABLE) from None


@contextmanager
def failing_disk_explained() -> Iterator[None]:
    """As `unusable_input_explained`, for commands that read or write: an error of the system is exit code 1."""
    try:
        with unusable_input_explained():
            yield
    except OSError as error:
        say(f"error: {error}")
        raise typer.Exit(EXIT_STOPPED) from None


def say(text: str) -> None:
    """A message of the program itself, on stderr."""
    print(f"zinfer: {text}", file=sys.stderr)
