"""`BatchingEngine`: requests of concurrent callers in shared batches, by the names that guides use for it."""

import asyncio
from typing import Any, Self

from zinfer.batching.async_llm import AsyncLLM
from zinfer.errors import ConfigError
from zinfer.mii.mii_pipeline import encode
from zinfer.mii.response import GenerationFinishReason, Response
from zinfer.requests.mii_params import MIIParams


class BatchingEngine:
    """An `AsyncLLM` whose callers await whole texts.

    Args:
        model: as for `zinfer.LLM`.
        max_batch_size: most sequences that run at once.
        max_wait_ms: without effect: a request joins the next pass, and none waits for a batch to fill.
        kwargs: as for `zinfer.LLM`.
    """

    def __init__(self, model: str, max_batch_size: int = 32, max_wait_ms: float = 0, **kwargs: Any) -> None:
        if max_batch_size < 1 or max_wait_ms < 0:
            raise ConfigError("max_batch_size must be at least 1, and max_wait_ms not negative")
        self.llm = AsyncLLM(model, max_sequences=max_batch_size, **kwargs)

    async def generate(self, prompt: str, **generate_kwargs: Any) -> Response:
        """Return the response to a prompt; keywords as for `zinfer.mii.pipeline`'s calls.

        Raises:
            ConfigError: the prompt or a keyword cannot be used.
        """
        params = MIIParams.read(generate_kwargs)
        encoded, own = await asyncio.to_thread(encode, self.llm.llm, [prompt], params)
        (completion,) = [each async for each in self.llm.stream(encoded, own)]
        if completion.error is not None:
            raise ConfigError(completion.error)
        text = prompt + completion.text if params.return_full_text else completion.text
        length = len(encoded[0]["prompt_token_ids"])
        return Response(text, length, len(completion.token_ids), GenerationFinishReason(completion.finish_reason))

    async def close(self) -> None:
        """Release the model."""
        await self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
