"""Runs passes: a ragged batch through transformers' modules, with resident or streamed weights."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.batching.adapters import patch_attention
from zinfer.batching.attention import MASKED_NAME, NAME, PagedAttention, attending
from zinfer.batching.head_pieces import HeadPieces, Take
from zinfer.batching.parts import PartedLayers
from zinfer.batching.pass_bucket import PassBucket, find_bucket
from zinfer.batching.ragged import Part, RaggedBatch
from zinfer.engine.streamed_model import StreamedModel
from zinfer.errors import ConfigError
from zinfer.graphs.forward_graphs import ForwardGraphs
from zinfer.kernels.kv_pages import PagedLayout
from zinfer.kv_cache.base import PageCache
from zinfer.kv_cache.device import KVCache
from zinfer.kv_cache.host import HostedKVCache
from zinfer.kv_cache.swap import SwapPlace
from zinfer.model.module_patches import ModulePatches
from zinfer.model.spec import ModelSpec
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.pass_sizes import REPLAYED_TOKENS, logit_rows, replayed_tokens
from zinfer.scheduling.schedule import Chunks


def open_pages(model: StreamedModel, spec: ModelSpec, budget: BatchingBudget) -> PageCache:
    """Open the KV cache of a model, on the device or in host memory.

    Args:
        spec: of the model.

    Raises:
        ConfigError: the device cannot read pages of the budget's dtype.
        PlanError, ScratchError: as `HostedKVCache`.
    """
    settings, folder = model.settings, None
    if budget.swaps_to_disk:
        assert settings.offload.nvme_path is not None, "sequences are to be swapped to a disk, and none is named"
        folder = settings.offload.nvme_path.absolute()
    place = (spec.kv, budget.num_pages, budget.page_size, budget.kv_dtype, model.device)
    swap_place = SwapPlace(budget.most_swapped_in_memory, folder, budget.staged_bytes)
    if not budget.is_hosted:
        return KVCache(*place, swap_place)
    return HostedKVCache(
        *place, swap_place, windows=spec.attention_windows, synchronous=settings.synchronous, trace=model.trace
    )


def with_few_counts(batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with the logits of its last token again and again, so that numbers of logits are few."""
    num_more = logit_rows(len(batch.wanted)) - len(batch.wanted)
    if num_more == 0:
        return batch
    return replace(batch, wanted=torch.cat([batch.wanted, batch.wanted[-1:].expand(num_more)]))


def _most_replayed_tokens(model: StreamedModel, graphs: ForwardGraphs | None) -> int:
    """Return the most tokens of a pass that Python takes longer to launch than the device to compute; 0: no graphs.

    Ranks that divide layers may have parts of different sizes, and agree.
    """
    if graphs is None:
        return 0
    largest = max((each.block.layout.numel for each in model.estimator.blocks if each.is_layer), default=1)
    most = replayed_tokens(largest)
    if model.ranks is None or model.ranks.mesh.num_dividing == 1:
        return most
    return min(map(int, model.ranks.exchange(most)))


def _decoder_layers(module: nn.Module, layers: Mapping[str, nn.Module], count: int) -> list[nn.Module]:
    """Return the last list of layers with ``count`` members, one for each layer of the cache."""
    lists: dict[str, list[nn.Module]] = {}
    for name, layer in layers.items():
        lists.setdefault(name.rpartition(".")[0], []).append(layer)
    if not (found := [each for each in lists.values() if len(each) == count]):
        sizes = ", ".join(str(len(each)) for each in lists.values())
        raise ConfigError(
            f"a {type(module).__name__} caches keys and values of {count} layers, and its lists of layers have {sizes}"
        )
    return found[-1]


class PagedForward:
    """A module's forward over ragged batches and a paged cache, with the attention of its layers, until `close`.

    Args:
        module: of a family that attends through transformers' interface, or has an adapter in `adapters`.
        layers: its layers by name, in order; those of a vision or audio tower may be among them.
        cache: has as many layers as the module's decoder.

    Raises:
        ConfigError: the decoder's layers are not one list.
    """

    def __init__(self, module: PreTrainedModel, layers: Mapping[str, nn.Module], cache: PageCache) -> None:
        self._module = module
        self._patches = ModulePatches()
        needs_mask = patch_attention(module, self._patches)
        self._attention = PagedAttention(cache.layers)
        own = _decoder_layers(module, layers, len(cache.layers))
        self._layers = PartedLayers(self._patches, own, self._attention, cache)
        self._config: Any = module.config.get_text_config(decoder=True)
        self._before = self._config._attn_implementation
        self._config._attn_implementation = MASKED_NAME if needs_mask else NAME
        self._takes_positions = "position_ids" in inspect.signature(type(module).forward).parameters

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        """Return the logits at ``batch.wanted``: [samples, vocabulary], in the model's dtype."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False, "logits_to_keep": batch.wanted}
        if self._takes_positions:
            inputs["position_ids"] = batch.position_ids
        self._layers.set(batch.parts)
        with attending(self._attention):
            logits: torch.Tensor = self._module(**inputs).logits
        return logits[0]

    def close(self) -> None:
        """Undo the patches."""
        self._patches.undo()
        self._layers.set(())
        self._config._attn_implementation = self._before


class PassRunner:
    """Runs passes with the attention of a model's modules over a paged cache, until `close`.

    Args:
        model, cache: as for `PagedForward`.
        graphs: replay the batches that have a `PassBucket`; None: every pass is launched by Python.

    Attributes:
        num_passes: passes run so far.
        padded_sizes: tokens that passes with prompts are padded to; none: only decodes are replayed, if anything is.
        is_settled: as of `ForwardGraphs`, of the last pass.
    """

    def __init__(self, model: StreamedModel, cache: PageCache, graphs: ForwardGraphs | None = None) -> None:
        self.model = model
        self.num_passes = 0
        self.is_settled = True
        self._forward = PagedForward(model.module, model.named_layers, cache)
        if model.stages is not None:
            model.stages.shares_logits = False  # the last stage draws, and sends tokens
        self._graphs = graphs
        self._page_size = cache.page_size
        self._most_replayed_tokens = _most_replayed_tokens(model, graphs)
        self.padded_sizes = tuple(size for size in REPLAYED_TOKENS if size <= self._most_replayed_tokens)

    @property
    def replays(self) -> bool:
        """Whether passes with a `PassBucket` are replayed."""
        return self._graphs is not None

    def bucket_of(self, chunks: Chunks, most_part_tokens: int | None) -> PassBucket | None:
        """Return the bucket of a pass, if it may be replayed; arguments as for `find_bucket`."""
        return find_bucket(chunks, self._page_size, self._most_replayed_tokens, most_part_tokens)

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Run a pass; returns the logits at ``batch.wanted``: [samples, vocabulary], in the model's dtype.

        Call `PageCache.expect` with the batch's chunks before.
        """
        self.num_passes += 1
        if batch.bucket is None or self._graphs is None:
            self.is_settled = True
            padded = with_few_counts(batch) if self.model.device.type == "cuda" else batch
            return self._call(lambda: self._forward(padded))[: len(batch.wanted)]
        (part,), graphs = batch.parts, self._graphs
        layout = part.layout
        tokens = batch.input_ids, batch.position_ids, batch.wanted, part.places
        tensors = *tokens, layout.query_starts, layout.context_lengths, layout.page_table
        numbers = layout.most_queries, layout.most_context, layout.num_decodes
        logits = self._call(lambda: graphs.call(self._single, *tensors, *numbers))
        self.is_settled = graphs.is_settled
        return logits

    def run_in_pieces(self, batch: RaggedBatch, most: int, take: Take) -> None:
        """Run a pass whose logits may not fit the memory at once; arguments as for `HeadPieces.run`.

        A stage without the head hands over nothing.
        """
        self.num_passes += 1
        if self.model.stages is not None and not self.model.stages.stage.is_last:
            self._call(lambda: self._forward(batch))
            return

        def forward(wanted: torch.Tensor) -> torch.Tensor:
            return self._forward(replace(batch, wanted=wanted))

        self._call(lambda: HeadPieces(self.model).run(forward, batch.wanted, most, take))

    def close(self) -> None:
        """Undo the patches."""
        if self._graphs is not None:
            self._graphs.close()
        self._forward.close()

    def _call(self, work: Any) -> torch.Tensor:
        found: torch.Tensor = self.model.call(work)
        return found

    def _single(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        wanted: torch.Tensor,
        places: torch.Tensor,
        starts: torch.Tensor,
        contexts: torch.Tensor,
        pages: torch.Tensor,
        most_queries: int,
        most_context: int,
        num_decodes: int | None,
    ) -> torch.Tensor:
        """Run a pass of a single part; such passes differ only in these arguments, so graphs can replay."""
        layout = PagedLayout(starts, contexts, pages, most_queries, most_context, num_decodes)
        part = Part(slice(0, input_ids.shape[1]), places, layout)
        return self._forward(RaggedBatch(input_ids, position_ids, wanted, (part,)))
