"""Makes the pages that a budget asks for, where it asks for them."""

from zinfer.engine.streamed_model import StreamedModel
from zinfer.kv_cache.base import PageCache
from zinfer.kv_cache.device import KVCache
from zinfer.kv_cache.host import HostedKVCache
from zinfer.kv_cache.swap import SwapPlace
from zinfer.model.spec import ModelSpec
from zinfer.planning.kv_budget import BatchingBudget


def open_pages(model: StreamedModel, spec: ModelSpec, budget: BatchingBudget) -> PageCache:
    """Pages for a model.

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
    swap_place = SwapPlace(budget.most_swapped_in_memory, folder)
    if not budget.is_hosted:
        return KVCache(*place, swap_place)
    return HostedKVCache(
        *place, swap_place, windows=spec.attention_windows, synchronous=settings.synchronous, trace=model.trace
    )
