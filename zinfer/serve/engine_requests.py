"""`EngineRequests`: the requests that a replica's process has under way, and their results on the way to the server.

[Note: one look a pass] The serving loop's thread notes which requests have got something. The event loop is woken by
the first of them and looks a millisecond later, once, when those of the whole pass are there; they leave together.
Waking a task for each token would take the interpreter from the thread that launches passes, again and again.
"""

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Final

from zinfer.batching.handle import Handle
from zinfer.batching.llm import LLM
from zinfer.errors import ConfigError
from zinfer.requests.completion import CompletionDelta
from zinfer.serve.messages import Connection, Deltas, Failed, Refused, Submit

_PAUSE_S: Final = 1e-3


class EngineRequests:
    """Submits requests to a model; used by the thread of the running event loop.

    Args:
        llm: completes them.
        connection: to the server; gets `Deltas`, and `Refused` and `Failed` for requests that fail.
    """

    def __init__(self, llm: LLM, connection: Connection) -> None:
        self._llm, self._connection = llm, connection
        self._loop = asyncio.get_running_loop()
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._handles: dict[int, Handle] = {}
        self._noted: deque[int] = deque()
        self._is_woken = False

    def submit(self, submit: Submit) -> None:
        """Start a request."""
        self._starting[submit.number] = asyncio.create_task(self._start(submit))

    def cancel(self, number: int) -> None:
        """End a request, if it has not ended; nothing more is sent of it."""
        if (starting := self._starting.get(number)) is not None:
            starting.cancel()
        if (handle := self._handles.pop(number, None)) is not None:
            self._llm.cancel(handle)

    async def close(self) -> None:
        """End all requests."""
        starting = list(self._starting.values())
        for number in [*self._starting, *self._handles]:
            self.cancel(number)
        await asyncio.gather(*starting, return_exceptions=True)

    async def _start(self, submit: Submit) -> None:
        number, precedence = submit.number, submit.precedence
        prompt = {"prompt_token_ids": submit.prompt_ids}
        options = {**precedence._asdict(), "deltas": not precedence.is_background}
        try:
            handle = await asyncio.to_thread(self._llm.prepare, [prompt], submit.params, **options)
            handle.watch(partial(self._note, number))
            self._handles[number] = handle
            self._llm.submit(handle)
            self._note(number)  # a prompt that cannot be used has its result already
        except ConfigError as error:
            self._handles.pop(number, None)
            self._connection.send(Refused(number, str(error), is_invalid=True))
        except Exception as error:
            self._handles.pop(number, None)
            self._fail([number], error)
        finally:
            del self._starting[number]

    def _note(self, number: int) -> None:
        """Note that a request may have got something; also called by the serving loop's thread."""
        self._noted.append(number)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the event loop was closed: nobody reads
                self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE_S, self._send)

    def _send(self) -> None:
        """Send what the noted requests have got."""
        self._is_woken = False  # before the look: what is noted meanwhile is looked for again
        numbers: dict[int, None] = {}
        while self._noted:
            numbers[self._noted.popleft()] = None
        found: list[tuple[int, CompletionDelta]] = []
        failed: dict[Exception, list[int]] = {}
        for number in numbers:
            if (handle := self._handles.get(number)) is None:
                continue
            try:
                found += [(number, CompletionDelta.of(each)) for each in handle.arrived()]
            except Exception as error:  # of a pass; the others of it have the same
                failed.setdefault(error, []).append(number)
            if handle.is_over:
                del self._handles[number]
        if found:
            self._connection.send(Deltas(found))
        for failure, several in failed.items():
            self._fail(several, failure)

    def _fail(self, numbers: list[int], error: Exception) -> None:
        self._connection.send(Failed(numbers, f"{type(error).__name__}: {error}", self._llm.is_closed))
