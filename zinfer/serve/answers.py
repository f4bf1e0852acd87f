"""Answers of OpenAI's two completion routes: one JSON object, or the events of a stream."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final
from uuid import uuid4

import msgspec
from fastapi import Response
from fastapi.sse import format_sse_event

from zinfer.requests.client_names import ClientNames
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.openai_choice import Echo, TextLogprobs, usage
from zinfer.requests.tool_parser import AnswerParser, with_calls
from zinfer.serve.body import beside_loop
from zinfer.serve.errors import ApiError
from zinfer.serve.prompts import Encoded
from zinfer.serve.service import Service
from zinfer.serve.tool_chunks import ToolChunks

_SCORE_BYTES: Final = 64
"""Of a token's log-probability in an answer, with the token's text."""


@dataclass(frozen=True)
class Call:
    """One call of a completion route.

    Attributes:
        several: its encoded prompts; choices are numbered over all their completions.
        echoes: for each prompt, what its choices begin with.
        model: the name that the answer has.
        names: those that errors have.
        includes_usage: whether a stream ends with the counts of tokens.
        open_parser: makes what reads calls of tools out of an answer; None: there are no tools.
    """

    service: Service
    several: Sequence[Encoded]
    echoes: Sequence[Echo | None]
    model: str
    names: ClientNames
    is_chat: bool
    includes_usage: bool = False
    open_parser: Callable[[], AnswerParser] | None = None

    async def whole(self) -> Response:
        """Complete all prompts, and return the answer. Errors are those of `Service.complete`."""
        async with self.service.admitted(self.several):
            found = await self._completions()
        num_bytes = sum(map(size_of_answer, chain.from_iterable(found)))
        return await beside_loop(num_bytes, lambda: json_response(self._answer(found)))

    def _answer(self, found: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        choices: list[msgspec.Raw] = []
        for encoded, echo, completions in zip(self.several, self.echoes, found, strict=True):
            choices += in_pieces(
                self._whole_choice(encoded, echo, each, len(choices) + place) for place, each in enumerate(completions)
            )
        num_new = sum(len(each.token_ids) for completions in found for each in completions)
        answer = {**self._frame(is_chunk=False), "choices": choices, "usage": self._usage(num_new)}
        if self.is_chat and (scores := found[0][0].prompt_logprobs) is not None:  # not in the choices, as vLLM's
            answer["prompt_logprobs"] = in_pieces(self.service.choices.scores(self.several[0].prompt_ids, scores))
        return answer

    async def _completions(self) -> list[list[Completion]]:
        """Return the completions of each prompt."""
        if len(self.several) == 1:
            return [await self.service.completions(self.several[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.service.completions(each)) for each in self.several]
        return [task.result() for task in tasks]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; an error after the first of them is an event too, one before is raised."""
        frame, num_new, has_begun = self._frame(is_chunk=True), 0, False
        if self.includes_usage:
            frame["usage"] = None
        try:
            with self.names.told():
                async with self.service.admitted(self.several), aclosing(self._choices()) as choices:
                    async for choice, num_tokens in choices:
                        num_new += num_tokens
                        if choice is not None:
                            has_begun = True
                            yield event({**frame, "choices": [choice]})
        except Exception as error:
            if not has_begun:
                raise
            yield event(ApiError.of(error).body)
            return
        if self.includes_usage:
            yield event({**frame, "choices": [], "usage": self._usage(num_new)})
        yield format_sse_event(data_str="[DONE]")

    def _whole_choice(self, encoded: Encoded, echo: Echo | None, completion: Completion, index: int) -> dict[str, Any]:
        choices, scores = self.service.choices, completion.prompt_logprobs
        skips_special = encoded.params.skip_special_tokens
        choice = choices.whole(completion, is_chat=self.is_chat, skips_special=skips_special, echo=echo)
        if not self.is_chat and echo is None and scores is not None:
            choice["prompt_logprobs"] = choices.scores(encoded.prompt_ids, scores)
        if self.open_parser is not None:
            choice = with_calls(choice, self.open_parser())
        return {**choice, "index": index}

    async def _choices(self) -> AsyncGenerator[tuple[dict[str, Any] | None, int], None]:
        """Yield the choices of chunks, each with the number of its new tokens; None: their text is held back.

        The first come with the engine's first answer: until then it may refuse the request.
        """
        tools = None if self.open_parser is None else ToolChunks(self.open_parser)
        waiting, firsts, logprobs = dict[int, Echo](), list[dict[str, Any]](), dict[int, TextLogprobs]()
        streams: list[AsyncGenerator[tuple[int, Encoded, CompletionDelta], None]] = []
        for first_index, encoded, echo in self._numbered_prompts():
            for index in range(first_index, first_index + encoded.params.n):
                if self.is_chat:
                    firsts.append(_first_of_chat(index))
                    continue
                begin, skips_special = 0 if echo is None else len(echo.text), encoded.params.skip_special_tokens
                logprobs[index] = TextLogprobs(self.service.choices, begin=begin, skips_special=skips_special)
                if echo is not None:
                    if encoded.params.prompt_logprobs is None:
                        firsts.append({**self.service.choices.echo(echo, None), "index": index})
                    else:
                        waiting[index] = echo
            streams.append(self._numbered(encoded, first_index))
        async with aclosing(_merged(streams)) as merged:
            async for index, encoded, delta in merged:
                while firsts:
                    yield firsts.pop(0), 0
                if (own := waiting.pop(index, None)) is not None:
                    scores = None if encoded.params.logprobs is None else delta.prompt_logprobs
                    yield {**self.service.choices.echo(own, scores), "index": index}, 0
                chunk = self.service.choices.chunk(delta, logprobs.get(index))
                if not delta.text and chunk["logprobs"] is None and delta.completion is None:
                    yield None, len(delta.token_ids)
                    continue
                chunks = [chunk] if tools is None else tools.split(index, chunk, delta)
                num_tokens = len(delta.token_ids)
                for each in chunks:
                    yield {**each, "index": index}, num_tokens
                    num_tokens = 0
                if num_tokens:
                    yield None, num_tokens

    def _numbered_prompts(self) -> Iterator[tuple[int, Encoded, Echo | None]]:
        """Yield each prompt and its echo, with the index of its first choice."""
        first_index = 0
        for encoded, echo in zip(self.several, self.echoes, strict=True):
            yield first_index, encoded, echo
            first_index += encoded.params.n

    async def _numbered(
        self, encoded: Encoded, first_index: int
    ) -> AsyncGenerator[tuple[int, Encoded, CompletionDelta], None]:
        async with aclosing(self.service.complete(encoded)) as deltas:
            async for delta in deltas:
                yield first_index + delta.sample_index, encoded, delta

    def _frame(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self, num_new: int) -> dict[str, int]:
        return usage(sum(len(each.prompt_ids) for each in self.several), num_new)


def in_pieces(values: Iterable[Any]) -> list[msgspec.Raw]:
    """Return values as JSON, each encoded by itself, because the encoder keeps all other threads waiting."""
    return [msgspec.Raw(msgspec.json.encode(each)) for each in values]


def json_response(content: Any) -> Response:
    """Return a response of a JSON value, parts of which may be encoded."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def size_of_answer(completion: Completion) -> int:
    """Return about how many bytes a completion has in an answer."""
    scores = chain(completion.logprobs or (), completion.prompt_logprobs or ())
    num_scores = sum(1 + len(each.top) for each in scores if each is not None)
    return len(completion.text) + _SCORE_BYTES * num_scores


def _first_of_chat(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def event(data: dict[str, Any]) -> bytes:
    """Return an object as an event of a stream."""
    return format_sse_event(data_str=json.dumps(data, ensure_ascii=False))


async def _merged(
    streams: Sequence[AsyncGenerator[tuple[int, Encoded, CompletionDelta], None]],
) -> AsyncGenerator[tuple[int, Encoded, CompletionDelta], None]:
    """Yield what several streams yield, as it comes; all end if one fails."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for each in stream:
                yield each
        return
    queue: asyncio.Queue[tuple[int, Encoded, CompletionDelta] | Exception | None] = asyncio.Queue()

    async def read(stream: AsyncIterator[tuple[int, Encoded, CompletionDelta]]) -> None:
        try:
            async for each in stream:
                queue.put_nowait(each)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(each)) for each in streams]
    num_left = len(tasks)
    try:
        while num_left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
