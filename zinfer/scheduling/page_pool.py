"""The pages of the KV cache by number: their reference counts, and the prefix cache that finds shared pages.

Knows numbers and tokens, not the memory behind them. A page is shared only when it is full, and a sequence writes only
after its full pages, so a shared page is never written and copy-on-write is not needed.

[Note: names] The key of a full page is the name of the prefix before it and its own tokens; each key gets a name.
Tokens are stored and compared, and names are never reused, so a page that is found holds exactly the tokens looked for,
even if hashes collide. When a page is taken for other tokens its name is dropped, and pages named after it are no
longer found, even if the same tokens are computed again, under a new name. They still count as free and are taken in
their turn. That is rare: a sequence frees its last pages first, so they are taken before the pages that they follow.
"""

from collections import OrderedDict
from itertools import count
from typing import Final

from zinfer.scheduling.sequence import Sequence

HOLE: Final = -1
"""Marks a dropped page in ``Sequence.pages``."""

_NOTHING_BEFORE: Final = 0
"""The name of the empty prefix."""

_Key = tuple[int, bytes]


class PagePool:
    """Pages with reference counts.

    Args:
        num_pages: pages, numbered from 0.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 1
        assert page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self._limit = num_pages
        self._num_users = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        # Unused pages that can still be found, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._names = count(_NOTHING_BEFORE + 1)
        self._found: dict[_Key, tuple[int, int]] = {}  # the page and its name
        self._key_of: list[_Key | None] = [None] * num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages, including unused ones in the prefix cache."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Number of pages held by sequences."""
        return self._limit - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold the first ``num_tokens`` of a sequence."""
        return -(-num_tokens // self.page_size)

    def take(self, num_pages: int) -> list[int]:
        """Take free pages for one user to write: pages without a name first, then the least recently used."""
        assert num_pages <= self.num_free, f"{num_pages} pages wanted, {self.num_free} free"
        blank, users = self._blank, self._num_users
        first = max(len(blank) - num_pages, 0)
        taken = blank[first:][::-1]
        del blank[first:]
        while len(taken) < num_pages:
            page, _ = self._idle.popitem(last=False)
            self._forget_name(page)
            taken.append(page)
        for page in taken:
            users[page] = 1
        return taken

    def find(self, sequence: Sequence) -> None:
        """Give a sequence that holds no pages those of the prefix cache that hold its prefix.

        They never include the last token, nor others that must be computed for their logits.
        """
        assert not sequence.pages
        for index in range(sequence.most_shared // self.page_size):
            [tokens] = self._tokens(sequence, index, index + 1)
            found = self._found.get((sequence.prefix, tokens))
            if found is None:
                return
            page, sequence.prefix = found
            sequence.num_named += 1
            if self._num_users[page] == 0:
                del self._idle[page]
            self._num_users[page] += 1
            sequence.pages.append(page)

    def publish(self, sequence: Sequence, end: int) -> None:
        """Add the sequence's pages up to number ``end`` (exclusive), all full, to the prefix cache.

        If another page already holds the same tokens, that page stays the one found, and the pages that follow here
        are named after it. Pages after a hole are found only if another sequence's page fills the hole.
        """
        begin, prefix = sequence.num_named, sequence.prefix
        key_of, users, names = self._key_of, self._num_users, self._names
        for page, tokens in zip(sequence.pages[begin:end], self._tokens(sequence, begin, end), strict=True):
            key = prefix, tokens
            if page == HOLE:
                prefix = self._found[key][1] if key in self._found else next(names)
                continue
            own = page, next(names)
            found = self._found.setdefault(key, own)
            prefix = found[1]
            if found is own:
                assert users[page] == 1, f"page {page} is published by a sequence that shares it"
                assert key_of[page] is None, f"page {page} was published before"
                key_of[page] = key
        sequence.prefix, sequence.num_named = prefix, max(begin, end)

    def drop_before(self, sequence: Sequence, position: int) -> None:
        """Free the pages entirely before a position and leave holes; for models in which every layer slides."""
        num_dropped = position // self.page_size
        if num_dropped > sequence.num_dropped:
            behind = slice(sequence.num_dropped, num_dropped)
            self._give_back(sequence.pages[behind])
            sequence.pages[behind] = [HOLE] * (num_dropped - sequence.num_dropped)
            sequence.num_dropped = num_dropped

    def release(self, sequence: Sequence) -> None:
        """Free all pages of the sequence."""
        self._give_back(sequence.pages)
        sequence.pages = []
        sequence.num_dropped = sequence.num_named = 0
        sequence.prefix = _NOTHING_BEFORE

    def confine(self, num_pages: int) -> dict[int, int]:
        """Use only the first ``num_pages``, until `confine` allows more; they must be enough for the pages in use.

        Returns:
            The pages to move, mapped to their new places. The caller copies their contents and updates their users.
        """
        assert 0 <= num_pages <= self.num_pages
        self._blank[:0] = range(num_pages - 1, self._limit - 1, -1)  # regained pages are taken last
        self._limit = num_pages
        for page in [page for page in self._idle if page >= num_pages]:
            del self._idle[page]
            self._forget_name(page)
        self._blank = [page for page in self._blank if page < num_pages]
        sources = [page for page, count in enumerate(self._num_users) if count and page >= num_pages]
        assert len(sources) <= self.num_free, f"{len(sources)} pages to make room for, {self.num_free} free"
        moved = dict(zip(sources, self.take(len(sources)), strict=True))
        for source, target in moved.items():
            self._num_users[target], self._num_users[source] = self._num_users[source], 0
            self._key_of[target], self._key_of[source] = self._key_of[source], None
            if (key := self._key_of[target]) is not None:
                self._found[key] = target, self._found[key][1]
        return moved

    def forget(self) -> None:
        """Drop the prefix cache, whose pages may be damaged."""
        self._blank += self._idle
        self._idle.clear()
        self._found.clear()
        self._key_of = [None] * self.num_pages

    def _tokens(self, sequence: Sequence, begin: int, end: int) -> list[bytes]:
        """Return the tokens of the sequence's pages ``begin`` to ``end``, page by page."""
        tokens = sequence.tokens(begin * self.page_size, end * self.page_size)
        packed, width = tokens.tobytes(), tokens.itemsize * self.page_size
        return [packed[at : at + width] for at in range(0, len(packed), width)]

    def _forget_name(self, page: int) -> None:
        key = self._key_of[page]
        assert key is not None
        del self._found[key]
        self._key_of[page] = None

    def _give_back(self, pages: list[int]) -> None:
        users, key_of = self._num_users, self._key_of
        for page in reversed(pages):
            if page == HOLE:
                continue
            num_left = users[page] = users[page] - 1
            assert num_left >= 0, f"page {page} was given back more often than it was taken"
            if num_left:
                continue
            if key_of[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None
