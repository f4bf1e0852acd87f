"""Lends pages that no text will need to the weights that stream: blocks that stay there need not come again.

A job ends with many passes of few tokens, each as long as the weights are on their way, while the cache empties.
Weights take its place until something new has to wait for pages.
"""

from zinfer.engine.streamed_model import StreamedModel
from zinfer.kv_cache.device import KVCache
from zinfer.scheduling.scheduler import Scheduler


class IdlePageLender:
    """The pages from a limit on, in which blocks of a model stay.

    Args:
        cache: whose pages are lent.
        model: whose blocks stream.
    """

    def __init__(self, cache: KVCache, model: StreamedModel) -> None:
        self._cache = cache
        self._model = model
        self._limit = cache.num_pages

    def adjust(self, scheduler: Scheduler) -> None:
        """Lend what is to spare, or take everything back where it is not; between two passes."""
        cache = self._cache
        if self._limit < cache.num_pages and (scheduler.is_short or self._limit < scheduler.num_wanted_pages):
            self.take_back()
            scheduler.confine(cache.num_pages)
        limit = cache.num_pages - scheduler.num_spare_pages
        if limit >= self._limit:
            return
        memory = cache.memory(limit, self._limit)
        if self._model.can_borrow(memory):
            self._limit = limit  # first of all: where what follows fails, all is taken back
            moved = scheduler.confine(limit)
            cache.move(list(moved), list(moved.values()))
            self._model.add_cache_slots(memory)

    def take_back(self) -> None:
        """Let the blocks stream again; the pages may be written to when this returns."""
        if self._limit < self._cache.num_pages:
            self._model.remove_cache_slots()
            self._limit = self._cache.num_pages
