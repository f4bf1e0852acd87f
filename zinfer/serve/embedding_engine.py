"""The process of a replica that embeds: rows of tokens that wait share passes over the encoder."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Self

import numpy as np

from zinfer.config import resolve_settings
from zinfer.config.settings import Settings
from zinfer.engine.engine import InferenceEngine
from zinfer.errors import PlanError
from zinfer.jobs.embedding_head import EmbeddingHead, describe
from zinfer.jobs.encoder import TOKENS_PER_PASS, Encoder, encoder_reserve, find_pad_token_id
from zinfer.jobs.execution_mode import check_task
from zinfer.jobs.request import Pooling, Task
from zinfer.model.build import build_meta_model
from zinfer.model.context_length import read_limits
from zinfer.model.padding import find_row_sharing
from zinfer.model.spec import ModelSpec
from zinfer.requests.prompt_encoder import find_tokenizer
from zinfer.serve.messages import Cancel, Connection, Embed, Embedded, Failed, Ready, Refused, ToEngine
from zinfer.serve.tasks import beside
from zinfer.weights import Checkpoint
from zinfer.weights.hub import ensure_downloaded

log = logging.getLogger("zinfer.serve")

_PASSES_TOGETHER: Final = 4
"""Rows for so many passes are sorted by length together."""
_MOST_TOKENS: Final = 1 << 20
"""Of a row, for a model that states no limit."""


class _Row(NamedTuple):
    number: int
    token_ids: Sequence[int]


class EmbeddingEngine:
    """Embeds rows in the order of their arrival.

    Args:
        model: folder of an encoder or a decoder.
        config: as for `zinfer.init_inference`.
        stated: keys beside it.
        pooling: of the token vectors.

    Raises:
        ConfigError, CheckpointError, PlanError: as `zinfer.init_inference`; the model takes no text.
    """

    def __init__(self, model: str | os.PathLike[str], config: Any, stated: Mapping[str, Any], pooling: Pooling) -> None:
        settings = resolve_settings(config, dict(stated))
        ensure_downloaded(model, download=settings.download)
        checkpoint = Checkpoint.open(model)
        described = build_meta_model(checkpoint, settings.dtype)
        check_task(described, Task.EMBED)
        limits = read_limits(described, settings.max_out_tokens, generates=False)
        folder = checkpoint.folder
        head = EmbeddingHead.read(folder, pooling)
        prompts = {name: head.prompt(name) for name in head.prompts}
        limits = head.limits(limits, folder)
        most_tokens = _MOST_TOKENS if limits.prompt is None else limits.prompt.max_tokens
        vocab_size = int(described.config.get_text_config().vocab_size)
        default = head.prompt(None)
        said = describe(head, default)
        self.ready = Ready(vocab_size, limits, most_tokens, said, embeds=True, prompts=prompts, default_prompt=default)
        self._tokens_per_pass = settings.batching.tokens_per_pass or TOKENS_PER_PASS
        pad_token_id = find_pad_token_id(described.config, find_tokenizer(folder))
        sharing = find_row_sharing(described, pad_token_id, generates=False)
        if sharing.why is not None:
            log.warning("%s", sharing.why)
        self._engine = _open_engine(model, settings, described.config, min(most_tokens, self._tokens_per_pass))
        self._encoder = Encoder(self._engine, head, pad_token_id, sharing)
        self._thread = ThreadPoolExecutor(1, "zinfer-embed")
        self._waiting: dict[int, _Row] = {}
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown()
        await asyncio.to_thread(self._engine.destroy)

    async def serve(self, connection: Connection, messages: "asyncio.Queue[ToEngine | None]") -> None:
        """Embed what the server sends until it ends."""
        connection.send(self.ready)
        async with beside(self._compute(connection)):
            while isinstance(message := await messages.get(), Embed | Cancel):
                if isinstance(message, Embed):
                    self._waiting[message.number] = _Row(message.number, message.token_ids)
                    self._arrived.set()
                else:
                    self._waiting.pop(message.number, None)

    async def _compute(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._arrived.clear()
            if not self._waiting:
                await self._arrived.wait()
                await asyncio.sleep(0)  # what one call sends arrives together
            for part in self._encoder.passes(self._take(), lambda row: len(row.token_ids), self._tokens_per_pass):
                try:
                    vectors = await loop.run_in_executor(self._thread, self._embed, part)
                except Exception as error:
                    connection.send(Failed([row.number for row in part], f"{type(error).__name__}: {error}"))
                    continue
                done = [(row.number, each) for row, each in zip(part, vectors, strict=True) if isinstance(each, bytes)]
                connection.send(Embedded(done))
                for row, each in zip(part, vectors, strict=True):
                    if isinstance(each, str):
                        connection.send(Refused(row.number, each, is_invalid=False))

    def _take(self) -> list[_Row]:
        """Remove the first rows that wait, for a few passes."""
        taken: list[_Row] = []
        most = _PASSES_TOGETHER * self._tokens_per_pass
        for row in list(self._waiting.values()):
            if taken and sum(len(each.token_ids) for each in taken) + len(row.token_ids) > most:
                break
            taken.append(self._waiting.pop(row.number))
        return taken

    def _embed(self, rows: Sequence[_Row]) -> list[bytes | str]:
        """Return each row's vector in float32, or its error."""
        return [
            each.error if each.error is not None else np.asarray(each.fields["embedding"], "<f4").tobytes()
            for each in self._encoder.encode([row.token_ids for row in rows])
        ]


def _open_engine(model: str | os.PathLike[str], settings: Settings, config: Any, row_len: int) -> InferenceEngine:
    try:
        spec = ModelSpec.read_encoder(config)
    except PlanError:  # a kind whose config does not give its width: nothing is reserved for activations
        return InferenceEngine(model, settings)
    tokens = settings.batching.tokens_per_pass or TOKENS_PER_PASS
    return InferenceEngine(model, settings, find_reserve=encoder_reserve(spec, row_len, tokens))
