"""`Chat`: questions, answers and commands of one conversation."""

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from pathlib import Path
from typing import Final

from zinfer.chat.client import ChatClient
from zinfer.chat.terminal import Terminal
from zinfer.errors import ConfigError, JobError

_HELP: Final = """\
/reset         forget the conversation
/regenerate    answer the last question again
/save FILE     write the conversation to a JSON file, as the messages of a request
/system TEXT   begin each conversation with this system message; without a text: with none
/exit          end (or exit, or Ctrl-D)
Ctrl-C ends an answer, Alt-Enter begins a new line. A message that begins with '/' needs a blank before it."""

_WORDS_TO_END: Final = ("exit", "quit")


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
            if line.strip() in _WORDS_TO_END and self._terminal.is_interactive:
                return
            if line.startswith("/"):
                if not await self._command(*line[1:].strip().split(maxsplit=1)):
                    return
            elif line.strip():
                await self._ask(line)

    def interrupt(self) -> None:
        """End the answer that is under way, if there is one."""
        if self._answering is not None:
            self._answering.cancel()

    async def _command(self, name: str = "", text: str | None = None) -> bool:
        """Do what a command says; returns whether the chat goes on."""
        match name:
            case "exit":
                return False
            case "reset":
                self.messages.clear()
                self._terminal.note("The conversation begins anew.")
            case "regenerate":
                await self._regenerate()
            case "save":
                self._save(text)
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

    async def _regenerate(self) -> None:
        """Answer the last question again; the former answer returns if that fails."""
        if not self.messages:
            self._terminal.complain("There is no question yet.")
            return
        former = self.messages[-2:]  # a question and its answer
        del self.messages[-2:]
        if not await self._ask(former[0]["content"]):
            self.messages += former

    def _save(self, path: str | None) -> None:
        if path is None:
            self._terminal.complain("/save needs the name of a file.")
            return
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                json.dump({"messages": self._with_system()}, file, ensure_ascii=False, indent=1)
        except OSError as error:
            self._terminal.complain(f"{path} cannot be written: {error.strerror}; give another file.")
            return
        self._terminal.note(f"The conversation is in {path}.")

    async def _ask(self, question: str) -> bool:
        """Add a question and its answer; false: there was no answer, and neither is added."""
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
            return False
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        return True

    def _with_system(self) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self.messages]

    async def _answer(self, parts: list[str]) -> None:
        began_s, first_s, num_tokens = time.monotonic(), None, None
        async with aclosing(self._client.answer(self._with_system())) as answer:
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
