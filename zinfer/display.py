"""Shows that work is alive: a bar on a terminal, otherwise one plain line every 10 s, however long a step takes.

A thread of its own writes; the work only sets numbers on its meter, so that nothing waits for the display. rich is
imported where something is shown: `zinfer --help` needs none of it.
"""

import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, TypeVar, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

from zinfer.nvme.pool import start_thread

HEARTBEAT_S: Final = 10.0
log = logging.getLogger("zinfer")


class LastingStream:
    """A text stream that drops what cannot be shown, because its reader, terminal or disk is gone: the work continues.

    Attributes:
        failure: the last one; None: all was taken so far.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_lost = False
        self.failure: Exception | None = None

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # how libraries find out what a stream takes
            raise TypeError(f"a text stream takes no {type(text).__name__}")
        self._try(lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "backslashreplace").decode())

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            call()
        except (OSError, ValueError) as failure:  # a ValueError: closed
            self.failure = failure
            self._is_lost = not isinstance(failure, BlockingIOError)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_streams() -> None:
    """Keep stdout and stderr usable even if their reader is gone.

    Closed standard descriptors are reopened on /dev/null. Otherwise the next opened file would get their number, and
    receive the output of libraries.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or os.fdopen(number, "w", encoding="utf-8", closefd=False)
        setattr(sys, name, cast(TextIO, LastingStream(stream)))


def print_text(console: "Console", text: str) -> None:
    """Print a message as it is; a terminal breaks its lines between words, elsewhere a line stays one."""
    from rich.text import Text

    console.print(Text(text), soft_wrap=not console.is_terminal)


class Progress(ABC):
    """What is done so far. Written by the threads that do it, read by the display's.

    Attributes:
        console: where it is shown; None: nowhere.
        notes: what was said.
    """

    def __init__(self, console: "Console | None") -> None:
        self.console = console
        self.notes: list[str] = []

    @abstractmethod
    def line(self) -> str:
        """The state in words, for people and for logs."""

    def short_line(self, width: int) -> str:
        """The state in words that fit a terminal of so many columns."""
        return self.line()

    @abstractmethod
    def share(self) -> float | None:
        """Done of all, from 0 to 1; None before that is known."""

    def pass_s(self) -> float | None:
        """Predicted seconds of a pass, which is waited for when the work is to stop; None if unknown."""
        return None

    def note(self, text: str) -> None:
        """Say something once, above the display, and keep it."""
        self.notes.append(text)
        if self.console is not None:
            print_text(self.console, text)


Shown = TypeVar("Shown", bound=Progress)
_current: list[Progress] = []


def pass_seconds() -> float | None:
    """Return the predicted seconds of a pass of the work that is shown; None if unknown."""
    return _current[-1].pass_s() if _current else None


@contextmanager
def shown(progress: Shown, interval_s: float = HEARTBEAT_S) -> Iterator[Shown]:
    """Show it on its console until the block ends. A console that can show nothing more does not end the block."""
    _current.append(progress)
    try:
        with _on_console(progress, interval_s):
            yield progress
    finally:
        _current.remove(progress)


@contextmanager
def _on_console(progress: Progress, interval_s: float) -> Iterator[None]:
    console = progress.console
    if console is None:
        yield
        return
    from rich.live import Live

    former = console.file
    console.file = cast(IO[str], LastingStream(former))
    bar = partial(_bar, progress, console)
    live = Live(get_renderable=bar, console=console, refresh_per_second=4, transient=True)
    try:
        with live if console.is_terminal else _heartbeat(progress, console, interval_s):
            yield
    finally:
        console.file = former


@contextmanager
def _heartbeat(progress: Progress, console: "Console", interval_s: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s):
            print_text(console, progress.line())

    def fail(failure: BaseException) -> None:
        log.error("the progress is not shown any more", exc_info=failure)

    # A daemon, so that a process that ends by a signal in an odd place does not wait for the display.
    thread = start_thread("zinfer-heartbeat", beat, fail)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar(progress: Progress, console: "Console") -> "Table":
    """A bar across the terminal, and below it the state in words."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    rows, share = Table.grid(), progress.share()
    rows.add_row(ProgressBar(total=1, completed=share or 0, width=console.width, pulse=share is None))
    rows.add_row(progress.short_line(console.width))
    return rows
