"""Runs passes: a ragged batch through the modules that transformers wrote, over weights wherever they are."""

import inspect
from typing import Any

import torch

from zinfer.batching.adapters import OwnAttention, wants_mask
from zinfer.batching.attention import MASKED_NAME, NAME, PagedAttention, attending
from zinfer.batching.page_cache import PageCache
from zinfer.batching.parts import PartedLayers
from zinfer.batching.ragged import RaggedBatch
from zinfer.engine import InferenceEngine


class PassRunner:
    """An engine whose attention goes over a cache of pages until `close`.

    Args:
        engine: its module's family is one that attends through transformers' interface, or has an attention here.
        cache: with as many layers as the module.
    """

    def __init__(self, engine: InferenceEngine, cache: PageCache) -> None:
        self.engine = engine
        self._own = OwnAttention(engine.module)
        self._attention = PagedAttention(cache.layers)
        self._layers = PartedLayers(engine.layers, self._attention, cache)
        self._config: Any = engine.module.config.get_text_config(decoder=True)
        self._before = self._config._attn_implementation
        self._config._attn_implementation = MASKED_NAME if wants_mask(self._config.model_type) else NAME
        self._takes_positions = "position_ids" in inspect.signature(type(engine.module).forward).parameters

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """The logits after the tokens that the batch wants them of, [samples, vocabulary], in the model's dtype.

        The cache expects the batch's chunks.
        """
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False, "logits_to_keep": batch.wanted}
        if self._takes_positions:
            inputs["position_ids"] = batch.position_ids

        def forward() -> torch.Tensor:
            self._layers.set(batch.parts)
            with attending(self._attention):
                logits: torch.Tensor = self.engine.module(**inputs).logits
            return logits[0]

        found: torch.Tensor = self.engine.call(forward)
        return found

    def close(self) -> None:
        """Let the module attend as before."""
        self._layers.remove()
        self._own.remove()
        self._config._attn_implementation = self._before
