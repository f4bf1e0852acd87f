"""`Terminal`: reads questions and shows answers; without a terminal it reads lines and prints plain text."""

import asyncio
import sys
import unicodedata
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.text import Text

from zinfer.errors import ConfigError


class Terminal:
    """Where a person talks with a model.

    Attributes:
        is_interactive: whether somebody types, and is told of errors without the end of the chat.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._out, self._notes = Console(highlight=False), Console(stderr=True, highlight=False)
        self._session = _session() if self.is_interactive else None
        self._num_lines = 0

    async def read(self) -> str | None:
        """Return the next question or command; None: there are no more.

        Raises:
            ConfigError: a line of a pipe is not UTF-8.
        """
        if self._session is None:
            line = await asyncio.to_thread(sys.stdin.buffer.readline)
            self._num_lines += 1
            try:
                return line.decode().rstrip("\n") if line else None
            except UnicodeDecodeError as error:
                place = f"line {self._num_lines}, byte {error.start + 1}"
                raise ConfigError(f"{place} of the input is not UTF-8; convert it, with iconv for instance") from error
        while True:
            try:
                text: str = await self._session.prompt_async("> ", handle_sigint=False)
                return text
            except KeyboardInterrupt:  # Ctrl-C: the line is dropped
                continue
            except EOFError:
                return None

    def show(self, text: str, *, end: str = "") -> None:
        """Show a part of an answer. Control characters are left out: they could change the terminal."""
        self._out.print(Text(_without_controls(text)), end=end, soft_wrap=True)

    def note(self, text: str) -> None:
        """Tell the person something about the chat; nobody is told without a terminal."""
        if self.is_interactive:
            self._out.print(Text(_without_controls(text), style="dim"))

    def complain(self, text: str) -> None:
        """Tell that something went wrong, perhaps in a server's words."""
        self._out.print(Text(_without_controls(text), style="red"))

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show that something takes its time."""
        return self._notes.status(Text(text))


def _without_controls(text: str) -> str:
    return "".join(each for each in text if each in "\n\t" or unicodedata.category(each) != "Cc")


def _session() -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    return PromptSession(key_bindings=keys, multiline=True, prompt_continuation="  ")
