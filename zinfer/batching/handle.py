"""`Handle`: the requests of one call, and their results as they arrive."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from zinfer.batching.request import Request
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.logprobs import Logprobs


class Token(NamedTuple):
    """The next token of a request; the first one brings the log-probabilities of its prompt, if it asks for them."""

    token_id: int
    logprobs: Logprobs | None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


Event: TypeAlias = tuple[Request, Token | Completion]


class Handle:
    """The requests of one call; one thread or task reads their results.

    Iterating it, by ``for`` or ``async for``, yields a `Completion` for each request as it ends; for requests with a
    detokenizer it yields a `CompletionDelta` for each token, the last of them with the completion. The iteration ends
    with the last request, or raises the error that ended their pass.

    Args:
        requests: to be completed.
        refused: yielded first: completions with the errors of prompts that cannot be used.
    """

    def __init__(self, requests: Sequence[Request], refused: Sequence[Completion | CompletionDelta] = ()) -> None:
        self.requests = requests
        self._refused = refused
        self._num_left = len(requests)
        self._events: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._wake: Callable[[], object] | None = None

    @property
    def is_over(self) -> bool:
        """Whether every result was read."""
        return not self._num_left

    def put(self, event: Event | BaseException) -> None:
        """Add a request's next token, its completion, or the error that ended all; called by the serving loop."""
        self._events.put(event)
        if self._wake is not None:
            with suppress(RuntimeError):  # the event loop was closed: no task waits
                self._wake()

    def watch(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called by the serving loop's thread after each event; it must not block."""
        self._wake = wake

    def arrived(self) -> Generator[Completion | CompletionDelta, None, None]:
        """Yield what iterating would and has arrived, without waiting for more."""
        refused, self._refused = self._refused, ()
        yield from refused
        while self._num_left and not self._events.empty():
            yield self._read(self._events.get())

    def __iter__(self) -> Generator[Completion | CompletionDelta, None, None]:
        yield from self._refused
        while self._num_left:
            yield self._read(self._events.get())

    async def __aiter__(self) -> AsyncGenerator[Completion | CompletionDelta, None]:
        for completion in self._refused:
            yield completion
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.watch(lambda: loop.call_soon_threadsafe(arrived.set))
        while self._num_left:
            arrived.clear()
            if self._events.empty():
                await arrived.wait()
            else:
                yield self._read(self._events.get())

    def _read(self, event: Event | BaseException) -> Completion | CompletionDelta:
        if isinstance(event, BaseException):
            self._num_left = 0
            raise event
        request, found = event
        self._num_left -= isinstance(found, Completion)
        if request.detokenizer is not None:
            return _delta(request, found)
        assert isinstance(found, Completion)
        return found


def _delta(request: Request, found: Token | Completion) -> CompletionDelta:
    detokenizer, place = request.detokenizer, (request.prompt_index, request.sample_index)
    assert detokenizer is not None
    if isinstance(found, Token):
        own = None if found.logprobs is None else (found.logprobs,)
        text = detokenizer.add(found.token_id)
        return CompletionDelta(*place, text, (found.token_id,), own, prompt_logprobs=found.prompt_logprobs)
    num_chars, num_tokens = detokenizer.num_chars, detokenizer.num_tokens
    rest = None if found.logprobs is None else found.logprobs[num_tokens:]
    scores = None if num_tokens else found.prompt_logprobs
    return CompletionDelta(*place, found.text[num_chars:], found.token_ids[num_tokens:], rest, found, scores)
