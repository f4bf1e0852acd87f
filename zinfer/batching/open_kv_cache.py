"""Makes the pages that a budget asks for, where it asks for them."""

from zinfer.engine.engine import InferenceEngine
from zinfer.kv_cache.base import PageCache
from zinfer.kv_cache.device import KVCache
from zinfer.kv_cache.host import HostedKVCache
from zinfer.kv_cache.swap import SwapPlace
from zinfer.model.batching_support import layer_windows
from zinfer.model.kv_shape import KVShape
from zinfer.planning.kv_budget import BatchingBudget


def open_pages(engine: InferenceEngine, shape: KVShape, budget: BatchingBudget) -> PageCache:
    """Pages for an engine's model.

    Args:
        shape: of its keys and values.

    Raises:
        ConfigError: the device cannot read pages of the budget's dtype.
        PlanError, ScratchError: as `HostedKVCache`.
    """
    settings, folder = engine.settings, None
    if budget.parks_on_disk:
        assert settings.offload.nvme_path is not None, "texts are to be kept on a disk, and none is named"
        folder = settings.offload.nvme_path.absolute()
    place = (shape, budget.num_pages, budget.page_size, budget.kv_dtype, engine.device)
    swap_place = SwapPlace(budget.most_swapped_in_memory, folder)
    if not budget.is_hosted:
        return KVCache(*place, swap_place)
    windows = layer_windows(engine.module.config)
    return HostedKVCache(*place, swap_place, windows=windows, synchronous=settings.synchronous, trace=engine.trace)
