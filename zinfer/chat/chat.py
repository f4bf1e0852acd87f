"""`Chat`: questions, answers and commands of one conversation."""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Final

from zinfer.chat.client import ChatClient
from zinfer.chat.terminal import Terminal
from zinfer.errors import ConfigError, JobError

_HELP: Final = """\
/reset         forget the conversation
/system TEXT   begin each conversation with this system message; without a text: with none
/exit          end (or Ctrl-D)
Ctrl-C ends an answer, Alt-Enter begins a new line. A message that begins with '/' needs a blank before it."""


class Chat:
    """A conversation with a model; what was said goes with each question.

    Args:
        client: opened.
        system: the system message; None: there is none.

    Attributes:
        messages: said so far, without the system message.
    """

    def __init__(self, client: ChatClient, terminal: Terminal, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self._client, self._terminal, self._system = client, terminal, system
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Talk until the person ends it.

        Raises:
            ConfigError, JobError: as `ChatClient.answer`, if nobody can be told in a terminal.
        """
        self._terminal.note(f"{self._client.model}: /help lists the commands")
        while (line := await self._terminal.read()) is not None:
            if line.startswith("/"):
                if not self._command(*line[1:].strip().split(maxsplit=1)):
                    return
            elif line.strip():
                await self._ask(line)

    def interrupt(self) -> None:
        """End the answer that is under way, if there is one."""
        if self._answering is not None:
            self._answering.cancel()

    def _command(self, name: str = "", text: str | None = None) -> bool:
        """Do what a command says; returns whether the chat goes on."""
        match name:
            case "exit":
                return False
            case "reset":
                self.messages.clear()
                self._terminal.note("The conversation begins anew.")
            case "system":
                self._system = text
                self.messages.clear()
                how = "without a system message" if text is None else "with this system message"
                self._terminal.note(f"The conversation begins anew, {how}.")
            case "help":
                self._terminal.note(_HELP)
            case _:
                self._terminal.complain(f"There is no command /{name}; /help lists them.")
        return True

    async def _ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        parts: list[str] = []
        self._answering = asyncio.create_task(self._answer(parts))
        try:
            await asyncio.wait((self._answering,))
        finally:  # also if the chat itself is ended
            task, self._answering = self._answering, None
            task.cancel()
        self._terminal.show("", end="\n")
        if task.cancelled():
            self._terminal.note("[ended by Ctrl-C]")
        elif (error := task.exception()) is not None:
            self.messages.pop()
            if not isinstance(error, ConfigError | JobError) or not self._terminal.is_interactive:
                raise error
            self._terminal.complain(str(error))
            return
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    async def _answer(self, parts: list[str]) -> None:
        began_s, first_s, num_tokens = time.monotonic(), None, None
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        async with aclosing(self._client.answer([*messages, *self.messages])) as answer:
            async for part in answer:
                if part.text and first_s is None:
                    first_s = time.monotonic() - began_s
                num_tokens = part.num_tokens or num_tokens
                parts.append(part.text)
                self._terminal.show(part.text)
        if num_tokens and first_s is not None:
            whole_s = time.monotonic() - began_s
            self._terminal.note(f"\n[{num_tokens} tokens in {whole_s:.1f} s, the first after {first_s:.2f} s]")


async def talk(
    terminal: Terminal,
    connection: AbstractAsyncContextManager[ChatClient],
    *,
    model: str | None,
    system: str | None,
    signals: Sequence[signal.Signals],
) -> int | None:
    """Connect and talk; returns the number of the signal that ended the chat, None: the person did.

    Args:
        connection: gives the client.
        model, system: as for `ChatClient.open` and `Chat`.
        signals: that end the chat; SIGINT ends only an answer once it has begun.

    Raises:
        ConfigError, JobError: as `ChatClient.open` and `Chat.run`.
    """
    loop, talking = asyncio.get_running_loop(), asyncio.current_task()
    chat: Chat | None = None
    ended_by: int | None = None

    def end(number: signal.Signals) -> None:
        nonlocal ended_by
        if number == signal.SIGINT and chat is not None:
            chat.interrupt()
            return
        ended_by = number
        assert talking is not None
        talking.cancel()

    for each in signals:
        loop.add_signal_handler(each, end, each)
    try:
        async with AsyncExitStack() as stack:
            with terminal.waiting("loading the model"):
                client = await stack.enter_async_context(connection)
                await client.open(model)
            chat = Chat(client, terminal, system)
            await chat.run()
    except asyncio.CancelledError:
        if ended_by is None:
            raise
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
    return ended_by
