"""`Service`: prompts in, completions out, over the replicas; what all routes of the server share."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.openai_choice import OpenAIChoices
from zinfer.scheduling.precedence import Precedence
from zinfer.serve.admission import Admission
from zinfer.serve.caller import CALLER
from zinfer.serve.errors import ApiError, ReplicaGone
from zinfer.serve.metrics import Metrics
from zinfer.serve.prompts import Encoded, Prompts
from zinfer.serve.replica import Replica
from zinfer.serve.replicas import choose

_AGAIN_S: Final = 0.5


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
            ReplicaGone: no replica is ready.
        """
        number = sum(each.params.n for each in several)
        if self.is_draining:
            raise ApiError(503, "the server is ending", retry_after_s=1)
        choose(self.replicas)
        with self._admission.admit(number, CALLER.get()):
            yield

    async def complete(self, encoded: Encoded) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what the completions of a prompt get, token by token; leaving it early cancels them.

        Raises:
            ReplicaGone, RequestFailed: as `Replica.complete`.
            ConfigError: the engine refuses the prompt.
        """
        self.check_task(embeds=False)
        with self.metrics.request(encoded) as measured:
            has_begun = False
            while True:
                replica = choose(self.replicas, encoded.prompt_ids, encoded.params.most_new_tokens)
                measured.begin(replica.index)
                try:
                    async with aclosing(
                        replica.complete(encoded.prompt_ids, encoded.params, encoded.precedence)
                    ) as deltas:
                        async for delta in deltas:
                            has_begun = True
                            measured.add(delta)
                            if delta.completion is not None and delta.completion.error is not None:
                                raise ConfigError(delta.completion.error)
                            yield delta
                    return
                except ReplicaGone:  # another one takes a request that has got nothing yet
                    if has_begun or all(each.ready is None for each in self.replicas):
                        raise

    async def embed(self, encoded: Encoded) -> bytes:
        """Return a row's vector, as `Replica.embed`.

        Raises:
            ReplicaGone, RequestFailed: as `Replica.embed`.
        """
        with self.metrics.request(encoded) as measured:
            while True:
                replica = choose(self.replicas)
                measured.begin(replica.index)
                try:
                    return await replica.embed(encoded.prompt_ids)
                except ReplicaGone:
                    if all(each.ready is None for each in self.replicas):
                        raise

    async def completions(self, encoded: Encoded) -> list[Completion]:
        """Return the completions of a prompt, in order. Errors are those of `complete`."""
        async with aclosing(self.complete(encoded)) as deltas:
            return await _whole(deltas)

    async def complete_in_background(self, encoded: Encoded) -> list[Completion]:
        """Return the completions of a prompt that gives way to all others; it waits for a replica that is ready.

        Raises:
            RequestFailed: as `Replica.complete`.
        """
        while True:
            try:
                replica = choose(self.replicas)
                deltas = replica.complete(encoded.prompt_ids, encoded.params, Precedence(is_background=True))
                async with aclosing(deltas):
                    return await _whole(deltas)
            except ReplicaGone:
                await asyncio.sleep(_AGAIN_S)


async def _whole(deltas: AsyncGenerator[CompletionDelta, None]) -> list[Completion]:
    found = [delta.completion async for delta in deltas if delta.completion is not None]
    return sorted(found, key=lambda each: each.sample_index)
