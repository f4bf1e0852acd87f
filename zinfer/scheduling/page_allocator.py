"""Gives the sequences that run their pages: those that hold a sequence's beginning already, and free ones.

Takes what it is told that a sequence may have. Who runs, and who makes room, is the scheduler's to decide.
"""

from typing import Final, NamedTuple

from zinfer.errors import PlanError
from zinfer.scheduling.page_pool import HOLE, PagePool
from zinfer.scheduling.sequence import Sequence

_MOST_RESERVED: Final = 1 / 16
"""Share of the pool that prompts leave to decodes at most: beyond it idle pages cost more than setting a few aside."""


class Beginning(NamedTuple):
    """What a sequence that begins to run has pages for.

    begin, end: positions of its first chunk; what comes before was found, or is restored.
    restored: the pages, in order, into which the last of what was swapped out goes.
    """

    begin: int
    end: int
    restored: tuple[int, ...]


def first_needed(position: int, window: int | None) -> int:
    """The first position that the token at ``position`` attends to.

    Args:
        window: positions that a token attends to, its own among them; None: all that come before.
    """
    return 0 if window is None else max(position - window + 1, 0)


class PageAllocator:
    """Pages of a pool, for sequences that need those of a window.

    Args:
        pool: all pages that there are; nobody else takes them.
        window: where every layer of the model slides, as for `first_needed`; pages behind it are given back.

    Attributes:
        is_short: whether a sequence got fewer pages than were wanted since it was last set to False.
        most_reserved: pages that prompts leave to decodes at most.
    """

    def __init__(self, pool: PagePool, window: int | None) -> None:
        assert window is None or window >= 1
        self._pool = pool
        self._window = window
        self.is_short = False
        self.most_reserved = int(pool.num_pages * _MOST_RESERVED)

    def pages_alone(self, num_prompt: int, max_new_tokens: int) -> int:
        """Pages without which a sequence cannot be completed; the last new token is never computed."""
        num_pages = self._pool.pages_for(num_prompt + max_new_tokens - 1)
        if self._window is None:
            return num_pages
        # So many neighbouring positions lie in one page more than they fill, where they begin at a page's last.
        return min(num_pages, self._pool.pages_for(self._window - 1) + 1)

    def pages_of(self, sequence: Sequence) -> int:
        """`pages_alone` of a sequence."""
        return self.pages_alone(len(sequence.prompt_ids), sequence.max_new_tokens)

    def check(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never be completed.

        Raises:
            PlanError: the pool could not hold it even alone.
        """
        num_pages, pool = self.pages_of(sequence), self._pool
        if num_pages > pool.num_pages:
            raise PlanError(
                f"{len(sequence.prompt_ids)} prompt tokens and {sequence.max_new_tokens} new ones take {num_pages} "
                f"pages of {pool.page_size} tokens, but the KV cache has {pool.num_pages}; shorten the prompt, lower "
                "max_new_tokens, or give the KV cache more memory"
            )

    def num_free_for_prompts(self, num_others: int) -> int:
        """Pages that a prompt may take: one is left for each of the others that run, within a share of the pool."""
        return max(self._pool.num_free - min(num_others, self.most_reserved), 0)

    def begin(self, sequence: Sequence, most_tokens: int, num_others: int) -> Beginning | None:
        """Pages for a sequence that waits or is preempted, to compute so many tokens at most; None where they are
        short.

        It holds none then. Alone it gets one page at least.
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
        """Take ``most`` pages at most for a sequence up to position ``end``; says how far they go."""
        num_wanted = self._pool.pages_for(end) - len(sequence.pages)
        self.is_short |= most < num_wanted
        sequence.pages += self._pool.take(min(num_wanted, most))
        return min(end, len(sequence.pages) * self._pool.page_size)

    def publish(self, sequence: Sequence, end: int) -> None:
        """Let others find the pages up to position ``end``, restored ones too, that are whole and have known tokens."""
        if sequence.shares:
            self._pool.publish(sequence, min(end, sequence.num_known) // self._pool.page_size)
