"""`AsyncLLM`: an `LLM` for asyncio that yields text as it is generated."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, cast

from torch import nn

from zinfer.batching.handle import Handle
from zinfer.batching.llm import LLM
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.requests.sampling_params import SamplingParams


class AsyncLLM:
    """An `LLM` whose calls are async generators; concurrent calls of any task or thread share passes.

    Leaving a call early, by `aclose` or because its task is cancelled, cancels its requests between two passes. The
    event loop is never blocked: another thread encodes prompts, and the LLM's own runs the passes.

    Args:
        model: as for `LLM`, which reads the weights before this returns.
        config: as for `LLM`.
        kwargs: as for `LLM`, with ``interactive`` true by default.

    Attributes:
        llm: the `LLM`, for its counters, plan and predictions.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        self.llm = LLM(model, config, **{"interactive": True, **kwargs})

    async def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Generate the completion of one prompt, or its ``n`` completions in parallel, token by token.

        Args:
            prompt: as for `LLM.generate`.
            params: by default greedy.
            options: other arguments of `LLM.generate`.

        Yields:
            The new text and tokens; the last delta of each completion has the whole `Completion`, with an ``error`` if
            the prompt cannot be used.

        Raises:
            ConfigError, RuntimeError: as `LLM.generate`.
        """
        async with self._submitted([prompt], params, deltas=True, **options) as handle:
            async for delta in handle:
                yield cast(CompletionDelta, delta)

    async def stream(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Completion, None]:
        """Generate the completions of many prompts, and yield each as soon as it is complete; as `LLM.stream`."""
        async with self._submitted(prompts, params, deltas=False, **options) as handle:
            async for completion in handle:
                yield cast(Completion, completion)

    async def close(self) -> None:
        """As `LLM.close`."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _submitted(self, *args: Any, **options: Any) -> AsyncIterator[Handle]:
        """Submit the requests of a call, and cancel them on exit."""
        handle = await asyncio.to_thread(self.llm.prepare, *args, **options)
        self.llm.submit(handle)
        try:
            yield handle
        finally:
            self.llm.cancel(handle)
