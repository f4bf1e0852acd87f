"""Allocates pages to running sequences: pages that already hold the sequence's prefix, and free ones.

The scheduler decides which sequences run or are preempted, and how many pages they may take.
"""

from typing import Final, NamedTuple

from zinfer.errors import PlanError
from zinfer.scheduling.page_pool import HOLE, PagePool
from zinfer.scheduling.sequence import Sequence

_MOST_RESERVED: Final = 1 / 16
"""Largest share of the pool that prompts leave to decodes: more idle pages would cost more than a few preemptions."""


class Beginning(NamedTuple):
    """The first chunk and the pages of a sequence that starts to run.

    begin, end: positions of its first chunk; the pages before were found in the prefix cache, or are swapped in.
    restored: the pages to swap in, in order: the last ones of those that were swapped out.
    """

    begin: int
    end: int
    restored: tuple[int, ...]


def first_needed(position: int, window: int | None) -> int:
    """Return the first position that the token at ``position`` attends to.

    Args:
        window: positions that a token attends to, its own included; None: all before it.
    """
    return 0 if window is None else max(position - window + 1, 0)


def pages_alone(num_prompt: int, max_new_tokens: int, page_size: int, window: int | None = None) -> int:
    """Return the pages that a sequence needs to be completed.

    Everything that asks whether a sequence fits the KV cache asks here: jobs, plans, the server and the scheduler.

    Args:
        num_prompt, max_new_tokens: tokens of the sequence; the last new one is never computed, so it has no place.
        page_size: tokens of a page.
        window: as for `first_needed`.
    """
    num_pages = -(-(num_prompt + max_new_tokens - 1) // page_size)
    if window is None:
        return num_pages
    # One page more than the positions fill, if they begin at the last position of a page.
    return min(num_pages, -(-(window - 1) // page_size) + 1)


def max_tokens_alone(num_pages: int, page_size: int) -> int:
    """Return the prompt and new tokens of the longest sequence that so many pages complete, without a window."""
    return num_pages * page_size + 1


def check_pages(num_prompt: int, max_new_tokens: int, num_pages: int, page_size: int, window: int | None) -> None:
    """Raise PlanError if a KV cache of ``num_pages`` could not hold a sequence even alone."""
    needed = pages_alone(num_prompt, max_new_tokens, page_size, window)
    if needed > num_pages:
        raise PlanError(
            f"{num_prompt} prompt tokens and {max_new_tokens} new ones take {needed} pages of {page_size} tokens, but "
            f"the KV cache has {num_pages}; shorten the prompt, lower max_new_tokens, or give the KV cache more memory "
            "(zinfer.kv_cache_memory)"
        )


def most_reserved(num_pages: int) -> int:
    """Return the most pages of a pool that prompts leave to decodes."""
    return int(num_pages * _MOST_RESERVED)


class PageAllocator:
    """Allocates pages of a pool.

    Args:
        pool: all pages; only this allocator takes them.
        window: if every layer of the model slides, as for `first_needed`; pages before the window are freed.

    Attributes:
        is_short: whether a sequence got fewer pages than it wanted since this was last set to False.
        most_reserved: most pages that prompts leave to decodes.
    """

    def __init__(self, pool: PagePool, window: int | None) -> None:
        assert window is None or window >= 1
        self._pool = pool
        self._window = window
        self.is_short = False
        self.most_reserved = most_reserved(pool.num_pages)

    def pages_of(self, sequence: Sequence) -> int:
        """Return `pages_alone` of a sequence."""
        return pages_alone(len(sequence.prompt_ids), sequence.max_new_tokens, self._pool.page_size, self._window)

    def check(self, sequence: Sequence) -> None:
        """Raise PlanError if the pool could not hold the sequence even alone."""
        pool = self._pool
        check_pages(len(sequence.prompt_ids), sequence.max_new_tokens, pool.num_pages, pool.page_size, self._window)

    def num_free_for_prompts(self, num_others: int) -> int:
        """Return the pages that a prompt may take: all but one for each other running sequence, up to a maximum."""
        return max(self._pool.num_free - min(num_others, self.most_reserved), 0)

    def begin(self, sequence: Sequence, most_tokens: int, num_others: int) -> Beginning | None:
        """Allocate pages for a waiting or preempted sequence to compute up to ``most_tokens``.

        Returns None if there are too few; the sequence then holds no pages. Alone it gets at least one page.
        """
        pool = self._pool
        if self.num_free_for_prompts(num_others) == 0:
            self.is_short = True
            return None
        if sequence.shares:
            pool.find(sequence)
        num_found = len(sequence.pages)
        num_swapped_out = sequence.num_computed
        begin = max(num_swapped_out, num_found * pool.page_size)
        end = min(sequence.num_tokens, begin + most_tokens)
        num_behind = first_needed(begin, self._window) // pool.page_size
        if num_behind:
            sequence.pages += [HOLE] * (num_behind - num_found)
            pool.drop_before(sequence, num_behind * pool.page_size)

        num_wanted = pool.pages_for(end) - len(sequence.pages)
        num_free = self.num_free_for_prompts(num_others)
        if num_others and num_free < min(num_wanted, self.pages_of(sequence)):
            pool.release(sequence)
            self.is_short = True
            return None
        end = self.extend(sequence, end, num_free)
        assert end > begin, "a sequence that runs alone has pages for its next token"
        return Beginning(
            begin, end, tuple(sequence.pages[max(num_found, num_behind) : pool.pages_for(num_swapped_out)])
        )

    def extend(self, sequence: Sequence, end: int, most: int) -> int:
        """Allocate up to ``most`` pages for a sequence up to position ``end``; returns the position they reach."""
        num_wanted = self._pool.pages_for(end) - len(sequence.pages)
        self.is_short |= most < num_wanted
        sequence.pages += self._pool.take(min(num_wanted, most))
        return min(end, len(sequence.pages) * self._pool.page_size)

    def extend_idle(self, sequence: Sequence, end: int, most: int) -> int:
        """As `extend`, for tokens that can do without: a sequence never holds more pages than it needs alone."""
        num_wanted = max(self._pool.pages_for(end) - len(sequence.pages), 0)
        num_left = self.pages_of(sequence) - (len(sequence.pages) - sequence.num_dropped)
        sequence.pages += self._pool.take(max(min(num_wanted, most, num_left), 0))
        return min(end, len(sequence.pages) * self._pool.page_size)

    def publish(self, sequence: Sequence, end: int) -> None:
        """Add the full pages with known tokens up to position ``end``, swapped-in ones too, to the prefix cache."""
        if sequence.shares:
            self._pool.publish(sequence, min(end, sequence.num_known) // self._pool.page_size)
