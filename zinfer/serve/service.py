"""`Service`: prompts in, completions out, over the replicas; what all routes of the server share."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from zinfer.errors import ConfigError
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.length_limits import LengthLimits, Limit
from zinfer.requests.openai_choice import OpenAIChoices
from zinfer.requests.prompt_encoder import PromptEncoder, PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.serve.errors import ApiError, ReplicaGone
from zinfer.serve.messages import Ready
from zinfer.serve.metrics import Metrics
from zinfer.serve.replica import Replica, choose

_AGAIN_S: Final = 0.5
_T = TypeVar("_T")


@dataclass(frozen=True)
class ServiceLimits:
    """What the server takes before it refuses.

    Attributes:
        max_requests: sequences under way at once; more get 429.
        max_prompts: prompts of one call.
    """

    max_requests: int = 4096
    max_prompts: int = 2048


@dataclass(frozen=True)
class Encoded:
    """A prompt's tokens, and its params with the number of new tokens filled in."""

    prompt_ids: list[int]
    params: SamplingParams


class Service:
    """Completes prompts of HTTP requests.

    Args:
        replicas: at least one, started by `start`.
        tokenizer: None: prompts must be token ids.
        names: of the model, the first one is told to clients.
        limits: of what is taken.

    Attributes:
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
        self._limits = limits
        self._encoder: PromptEncoder | None = None
        self._ready: Ready | None = None
        self._most_tokens = self._vocab_size = 0
        self._num_running = 0
        # A single thread: tokenizers and the process that renders chat templates are not thread-safe.
        self._thread = ThreadPoolExecutor(1, "zinfer-encode")

    async def start(self) -> None:
        """Load the model in all replicas. Raises ConfigError and JobError as `Replica.start`."""
        await asyncio.gather(*(each.start() for each in self.replicas))
        ready = self.replicas[0].ready
        assert ready is not None
        self._open(ready)

    async def close(self) -> None:
        """End all replicas."""
        self.is_draining = True
        await asyncio.gather(*(each.close() for each in self.replicas))
        self._thread.shutdown()
        if self._encoder is not None:
            self._encoder.close()

    @property
    def length_limits(self) -> LengthLimits:
        """What the context and the KV cache hold of one sequence."""
        return LengthLimits(total=Limit(self._most_tokens, "the context and the KV cache"))

    @property
    def latency(self) -> str:
        """A line on the times of answers to be expected of one replica."""
        return "" if self._ready is None else self._ready.latency

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

    async def encode(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        variables: Mapping[str, Any] | None = None,
        *,
        default_new: int | None = None,
    ) -> list[Encoded]:
        """Encode the prompts of a call.

        Args:
            variables: of the chat template.
            default_new: new tokens unless the call states them; None: what the context and the KV cache leave.

        Raises:
            ConfigError: a prompt or its params are invalid.
            ApiError: there are too many prompts.
        """
        if len(prompts) > self._limits.max_prompts:
            raise ApiError(400, f"prompt: {len(prompts)} prompts are more than {self._limits.max_prompts} of one call")
        return await self.on_thread(lambda: [self._encode(each, params, variables, default_new) for each in prompts])

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises ApiError if there is no tokenizer, or a token is beyond the vocabulary."""
        if self.tokenizer is None:
            raise ApiError(400, "the model's folder has no tokenizer")
        beyond = next((each for each in token_ids if each >= self._vocab_size), None)
        if beyond is not None:
            raise ApiError(400, f"tokens: token ids are below {self._vocab_size}, not {beyond}", param="tokens")
        text: str = await self.on_thread(lambda: self.tokenizer.decode(token_ids))
        return text

    async def on_thread(self, work: Callable[[], _T]) -> _T:
        """Run work with the tokenizer on the thread that owns it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

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
        if self._num_running + number > self._limits.max_requests:
            self.metrics.num_refused.inc()
            raise ApiError(
                429,
                f"{self._num_running} sequences are under way, and {number} more than the limit of "
                f"{self._limits.max_requests} allows; try again later",
                retry_after_s=1,
            )
        self._num_running += number
        try:
            yield
        finally:
            self._num_running -= number

    async def complete(self, encoded: Encoded) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what the completions of a prompt get, token by token; leaving it early cancels them.

        Raises:
            ReplicaGone, RequestFailed: as `Replica.complete`.
            ConfigError: the engine refuses the prompt.
        """
        with self.metrics.request(encoded) as measured:
            has_begun = False
            while True:
                replica = choose(self.replicas)
                measured.begin(replica.index)
                try:
                    async with aclosing(replica.complete(encoded.prompt_ids, encoded.params)) as deltas:
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
                deltas = replica.complete(encoded.prompt_ids, encoded.params, is_background=True)
                async with aclosing(deltas):
                    return await _whole(deltas)
            except ReplicaGone:
                await asyncio.sleep(_AGAIN_S)

    def new_encoder(self, tokenizer: Any) -> PromptEncoder:
        """Return an encoder of this model's prompts with a tokenizer of its own."""
        ready = self._ready
        assert ready is not None
        return PromptEncoder(tokenizer, ready.vocab_size, ready.limits)

    def _open(self, ready: Ready) -> None:
        self._ready = ready
        self._encoder = self.new_encoder(self.tokenizer)
        self._vocab_size = ready.vocab_size
        positions = ready.limits.most_tokens
        self._most_tokens = ready.most_tokens if positions is None else min(positions, ready.most_tokens)

    def _encode(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        variables: Mapping[str, Any] | None,
        default_new: int | None,
    ) -> Encoded:
        assert self._encoder is not None
        token_ids, filled = self._encoder.encode(prompt, params, variables)
        if params.max_new_tokens is None:
            num_left = self._most_tokens - len(token_ids)
            most = num_left if default_new is None else min(default_new, num_left)
            filled = replace(filled, max_new_tokens=max(1, most))
        return Encoded(token_ids, filled)


async def _whole(deltas: AsyncGenerator[CompletionDelta, None]) -> list[Completion]:
    found = [delta.completion async for delta in deltas if delta.completion is not None]
    return sorted(found, key=lambda each: each.sample_index)
