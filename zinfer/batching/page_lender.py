"""Lends KV cache pages that no sequence will need to streamed weights: blocks cached there are not copied again.

A job ends with many passes of few tokens, each as long as the copy of the weights, while the cache empties. Weights are
cached in its free pages until a new sequence has to wait for pages.
"""

from zinfer.engine.streamed_model import StreamedModel
from zinfer.kv_cache.device import KVCache
from zinfer.scheduling.scheduler import Scheduler


class IdlePageLender:
    """Lends the pages above a limit to a model's streamed blocks.

    Args:
        cache: owns the pages.
        model: owns the streamed blocks.
    """

    def __init__(self, cache: KVCache, model: StreamedModel) -> None:
        self._cache = cache
        self._model = model
        self._limit = cache.num_pages

    def adjust(self, scheduler: Scheduler) -> None:
        """Lend the spare pages, or take all back when sequences need them; between two passes."""
        cache = self._cache
        if self._limit < cache.num_pages and (scheduler.is_short or self._limit < scheduler.num_wanted_pages):
            self.take_back()
            scheduler.confine(cache.num_pages)
        limit = cache.num_pages - scheduler.num_spare_pages
        if limit >= self._limit:
            return
        memory = cache.memory(limit, self._limit)
        if self._model.can_borrow(memory):
            self._limit = limit  # first: if what follows fails, all pages are taken back
            moved = scheduler.confine(limit)
            cache.move(list(moved), list(moved.values()))
            self._model.add_cache_slots(memory)

    def take_back(self) -> None:
        """Let the blocks stream again; when this returns, the pages may be written."""
        if self._limit < self._cache.num_pages:
            self._model.remove_cache_slots()
            self._limit = self._cache.num_pages
