"""`Service`: prompts in, completions out, over the replicas; what all routes of the server share."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from zinfer.errors import ConfigError
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.openai_choice import OpenAIChoices
from zinfer.scheduling.precedence import Precedence
from zinfer.serve.admission import Admission
from zinfer.serve.caller import CALLER
from zinfer.serve.errors import ApiError, Lost, ReplicaGone, RequestFailed
from zinfer.serve.metrics import MeasuredRequest, Metrics
from zinfer.serve.prompts import Encoded, Prompts
from zinfer.serve.replica import Replica
from zinfer.serve.replicas import choose
from zinfer.serve.suspects import Case, Suspects

_T = TypeVar("_T")
_AGAIN_S: Final = 0.5
_NEW_WAIT_S: Final = 30.0
"""Until a new request gets 503 because all replicas are started again; /ready says so at once."""
_AGAIN_WAIT_S: Final = 600.0
"""Likewise of a request that a replica has lost: as long as OpenAI's client waits."""
_FIRST: Final = Precedence(priority=-(1 << 31))
"""Of a request on trial, for which others wait."""


@dataclass(frozen=True)
class ServiceLimits:
    """What the server takes before it refuses.

    Attributes:
        max_requests: sequences under way at once; more get 429.
        max_prompts: prompts of one call.
        is_shared: among callers with keys of their own, each of whom leaves room for others.
    """

    max_requests: int = 4096
    max_prompts: int = 2048
    is_shared: bool = False


class Service:
    """Completes prompts of HTTP requests.

    Args:
        replicas: at least one, started by `start`.
        tokenizer: None: prompts must be token ids.
        names: of the model, the first one is told to clients.
        limits: of what is taken.

    Attributes:
        prompts: encodes them.
        choices: builds the choices of answers.
        began: when it was made, in seconds since the epoch.
        is_draining: whether it refuses new requests, because it ends.
    """

    def __init__(
        self, replicas: Sequence[Replica], tokenizer: Any, names: Sequence[str], limits: ServiceLimits
    ) -> None:
        self.replicas, self.tokenizer, self.names = replicas, tokenizer, names
        self.metrics = Metrics(names[0], replicas)
        self.choices = OpenAIChoices(tokenizer)
        self.began = int(time.time())
        self.is_draining = False
        self.prompts = Prompts(tokenizer, limits.max_prompts)
        self.suspects = Suspects()
        self._admission = Admission(limits.max_requests, is_shared=limits.is_shared, refused=self.metrics.num_refused)

    async def start(self) -> None:
        """Load the model in all replicas. Raises ConfigError and JobError as `Replica.start`."""
        await asyncio.gather(*(each.start() for each in self.replicas))
        ready = self.replicas[0].ready
        assert ready is not None
        self.prompts.open(ready)

    async def close(self) -> None:
        """End all replicas."""
        self.is_draining = True
        await asyncio.gather(*(each.close() for each in self.replicas))
        self.prompts.close()

    @property
    def latency(self) -> str:
        """A line on the times of answers to be expected of one replica."""
        ready = self.replicas[0].ready
        return "" if ready is None else ready.latency

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes requests."""
        return not self.is_draining and any(each.ready is not None for each in self.replicas)

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer has. Raises ApiError for another model's name."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"model {name!r:.100} does not exist here; use {self.names[0]!r}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_task(self, *, embeds: bool) -> None:
        """Raise ApiError if the server does the other task: it embeds, or it completes."""
        if self.prompts.embeds and not embeds:
            raise ApiError(400, "this server embeds; start `zinfer serve` without --task embed for completions")
        if embeds and not self.prompts.embeds:
            raise ApiError(400, "this server completes; start `zinfer serve --task embed` for embeddings")

    @asynccontextmanager
    async def admitted(self, several: Sequence[Encoded]) -> AsyncGenerator[None, None]:
        """Count sequences as under way.

        Raises:
            ApiError: they are too many, or the server is ending.
            ReplicaGone: no replica is ready, and none that is started again becomes so.
        """
        number = sum(each.params.n for each in several)
        if self.is_draining:
            raise ApiError(503, "the server is ending", retry_after_s=1)
        with self._admission.admit(number, CALLER.get()):
            await self._choose(None, wait_s=_NEW_WAIT_S)
            yield

    async def complete(self, encoded: Encoded) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what the completions of a prompt get, token by token; leaving it early cancels them.

        If the replica ends, or a pass fails, before there is anything, the prompt is tried again.

        Raises:
            Lost: the replica ended, or a pass failed, after a part of the answer.
            ReplicaGone: no replica is ready.
            RequestFailed: the prompt cannot be computed, or is what ends replicas.
            ConfigError: the engine refuses the prompt.
        """
        self.check_task(embeds=False)
        case, has_begun = Case(), False
        with self.metrics.request(encoded) as measured, self.suspects.under_way(case):
            while True:
                await self.suspects.turn(case)
                try:
                    async with aclosing(self._attempt(encoded, case, measured)) as deltas:
                        async for delta in deltas:
                            has_begun = True
                            yield delta
                    return
                except Lost as lost:
                    self.suspects.note(lost, case)
                    if has_begun:
                        raise

    async def completions(self, encoded: Encoded) -> list[Completion]:
        """Return the completions of a prompt, in order. Errors are those of `complete`, but for `Lost`."""
        self.check_task(embeds=False)
        with self.metrics.request(encoded) as measured:
            return await self._tried(Case(), lambda case: _whole(self._attempt(encoded, case, measured)))

    async def embed(self, encoded: Encoded) -> bytes:
        """Return a row's vector, as `Replica.embed`.

        Raises:
            ReplicaGone: no replica is ready.
            RequestFailed: as `complete`.
        """
        with self.metrics.request(encoded) as measured:

            async def attempt(case: Case) -> bytes:
                replica = await self._choose(case, wait_s=_AGAIN_WAIT_S)
                measured.begin(replica.index)
                return await replica.embed(encoded.prompt_ids, name=case)

            return await self._tried(Case(), attempt)

    async def complete_in_background(self, encoded: Encoded, case: Case) -> list[Completion]:
        """Return the completions of a prompt that gives way to all others; it waits for a replica that is ready.

        Raises:
            RequestFailed: as `complete`.
        """

        async def attempt(case: Case) -> list[Completion]:
            while True:
                try:
                    replica = self._replica_for(case)
                    precedence = _FIRST if case.is_suspect else Precedence(is_background=True)
                    return await _whole(replica.complete(encoded.prompt_ids, encoded.params, precedence, name=case))
                except Lost:
                    raise
                except ReplicaGone:
                    await asyncio.sleep(_AGAIN_S)

        return await self._tried(case, attempt)

    async def _tried(self, case: Case, attempt: Callable[[Case], Awaitable[_T]]) -> _T:
        """Return what an attempt does, of several if replicas end meanwhile."""
        with self.suspects.under_way(case):
            while True:
                await self.suspects.turn(case)
                try:
                    return await attempt(case)
                except Lost as lost:
                    self.suspects.note(lost, case)

    async def _attempt(
        self, encoded: Encoded, case: Case, measured: MeasuredRequest
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what one replica gives."""
        replica = await self._choose(case, encoded.prompt_ids, encoded.params.most_new_tokens, wait_s=_AGAIN_WAIT_S)
        measured.begin(replica.index)
        precedence = encoded.precedence._replace(priority=_FIRST.priority) if case.is_suspect else encoded.precedence
        deltas = replica.complete(encoded.prompt_ids, encoded.params, precedence, name=case)
        async with aclosing(deltas):
            async for delta in deltas:
                self.suspects.advance(case, len(delta.token_ids))
                measured.add(delta)
                if (done := delta.completion) is not None and done.error is not None:
                    raise ConfigError(done.error) if done.is_invalid else RequestFailed(done.error)
                yield delta

    async def _choose(
        self, case: Case | None, prompt_ids: Sequence[int] = (), num_new: int = 0, *, wait_s: float
    ) -> Replica:
        """Return a replica that is ready, perhaps once one that is started again is so; raises as `choose`."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                return self._replica_for(case, prompt_ids, num_new)
            except ReplicaGone:
                is_coming = any(each.is_coming_back for each in self.replicas) and not self.is_draining
                if not is_coming or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def _replica_for(self, case: Case | None, prompt_ids: Sequence[int] = (), num_new: int = 0) -> Replica:
        """Return a replica that may run a request now, and note so; raises as `choose`."""
        if case is None:
            return choose(self.replicas)
        case.replica = None
        fit = [each for each in self.replicas if self.is_draining or self.suspects.may_run(case, each)]
        case.replica = found = choose(fit, prompt_ids, num_new)
        return found


async def _whole(deltas: AsyncGenerator[CompletionDelta, None]) -> list[Completion]:
    async with aclosing(deltas):
        found = [delta.completion async for delta in deltas if delta.completion is not None]
    return sorted(found, key=lambda each: each.sample_index)
