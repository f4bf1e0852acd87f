"""An engine without a model: the next token is a pure function of a sequence's tokens, and pages record their writers.

It checks the scheduler's guarantees in every pass, and stops at the first violation.
"""

from collections import Counter
from functools import cache

from zinfer.kv_cache.transfers import find_traffic
from zinfer.scheduling.page_pool import HOLE, PagePool
from zinfer.scheduling.schedule import Chunk, Pass
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.sequence import PENDING, Sequence, SequenceState

NUM_TOKENS_KNOWN = 3
"""Few, so that sequences come upon the same texts and their pages are shared."""


@cache
def prefix_id(before: int, token: int) -> int:
    """A number for a prefix (that of the prefix before, and its last token) that no other prefix has."""
    return prefix_id.cache_info().currsize + 1


def next_token(tokens: tuple[int, ...]) -> int:
    """Depends on the last tokens alone, so that texts which once agree go on agreeing."""
    return (sum(token * place for place, token in enumerate(tokens[-5:], 1)) + len(tokens) // 7) % NUM_TOKENS_KNOWN


def completion(prompt: tuple[int, ...], num_new: int) -> list[int]:
    """What a sequence says when it is alone."""
    tokens = prompt
    for _ in range(num_new):
        tokens += (next_token(tokens),)
    return list(tokens[len(prompt) :])


class PagedEngine:
    """Computes what a scheduler hands out, on pages that hold the prefix up to each token."""

    num_sets = 1  # passes under way at once

    def __init__(self, scheduler: Scheduler, token_budget: int, window: int | None) -> None:
        self.scheduler = scheduler
        self.pool: PagePool = scheduler.pool
        self.token_budget = token_budget
        self.window = window
        self.num_passes = self.num_swapped_out = self.num_swapped_in = self.num_recomputed = self.num_shared = 0
        self._pages = [[0] * self.pool.page_size for _ in range(self.pool.num_pages)]
        self._host: dict[int, list[list[int]]] = {}
        self._prefixes: dict[int, list[int]] = {}
        self._before: dict[int, tuple[Sequence, list[int]]] = {}
        self._held: Counter[int] = Counter()
        self._admitted: dict[int, Sequence] = {}
        self._scored: Counter[tuple[int, int]] = Counter()
        self.behind_guesses: dict[int, list[int]] = {}

    def compute(self, coming: Pass) -> dict[int, int]:
        """One pass; gives the next tokens."""
        self.num_passes += 1
        self.num_swapped_out += len(coming.swapped_out)
        self.num_swapped_in += len(coming.swapped_in)
        # Those that ran before the pass and were not set aside in it.
        kept = [pages for sequence, pages in self._before.values() if sequence.state is SequenceState.RUNNING]
        self._held = Counter(page for pages in kept for page in pages)
        self._check_shape(coming)
        for sequence, pages in coming.swapped_out:
            assert sequence.number not in self._host
            assert HOLE not in pages
            self._host[sequence.number] = [list(self._pages[page]) for page in pages]
        for sequence, pages in coming.swapped_in:
            self._resume(sequence, pages)
        self._bring(coming)
        written: dict[int, int] = {}  # who wrote to a page
        for chunk in coming.chunks:
            self._write(chunk, written)
            self._check_context(chunk)  # as an engine does that computes a part of the pass after the other
        for chunk in coming.chunks:
            self._check_context(chunk)  # as one does that writes all keys first
        self._check_sharers(coming, written)
        self._let_go()
        self.behind_guesses = {c.sequence.number: self._verify(c) for c in coming.chunks if c.sequence.guesses}
        ends = {c.sequence: c.end - len(c.sequence.guesses) for c in coming.chunks if c.samples}
        return {sequence.number: next_token(tuple(sequence.tokens(0, end))) for sequence, end in ends.items()}

    def _verify(self, chunk: Chunk) -> list[int]:
        """Give the tokens behind each guess; what was computed of the guesses is not kept in mind."""
        sequence = chunk.sequence
        ends = range(chunk.end - len(sequence.guesses) + 1, chunk.end + 1)
        found = [next_token(tuple(sequence.tokens(0, end))) for end in ends]
        del self._prefixes[sequence.number][sequence.num_tokens :]
        return found

    def check_counts(self, sequences: list[Sequence]) -> None:
        """The pool's counts are those of the pages that sequences hold; only running ones hold any."""
        held: Counter[int] = Counter()
        for sequence in sequences:
            if not sequence.pages:
                assert sequence.num_dropped == 0
                continue
            pages = [page for page in sequence.pages if page != HOLE]
            assert len(set(pages)) == len(pages)
            assert sequence.state is SequenceState.RUNNING
            assert sequence.pages.count(HOLE) == sequence.num_dropped
            held.update(pages)
        assert held == {page: count for page, count in enumerate(self.pool._num_users) if count}
        assert self.pool.num_used == len(held)
        self.num_shared += any(count > 1 for count in held.values())
        self._before = {sequence.number: (sequence, list(sequence.pages)) for sequence in sequences if sequence.pages}

    def assert_scored(self, sequence: Sequence) -> None:
        """Each token that is to be scored had its logits once, and no other one."""
        found = {at: count for (number, at), count in self._scored.items() if number == sequence.number}
        assert found == dict.fromkeys(range(sequence.num_to_score), 1)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is parked of a sequence that was aborted."""
        self._host.pop(sequence.number, None)

    def move(self, moved: dict[int, int]) -> None:
        """Copy pages; what lies in lent ones is spoilt."""
        for source, target in moved.items():
            self._pages[target] = list(self._pages[source])
        self._before = {
            number: (sequence, [moved.get(page, page) for page in pages])
            for number, (sequence, pages) in self._before.items()
        }
        for page in range(self.pool.num_free + self.pool.num_used, self.pool.num_pages):
            self._pages[page] = [-1] * self.pool.page_size

    def assert_empty(self) -> None:
        """Nothing is held, on the device or in host memory."""
        assert self.pool.num_used == 0
        assert not self._host

    def _bring(self, coming: Pass) -> None:
        """Have the pages where they are computed with."""

    def _let_go(self) -> None:
        """Have what was written where the pages are at home."""

    def _check_shape(self, coming: Pass) -> None:
        assert coming.chunks, "a pass computes something"
        if self.num_sets > 1:
            assert not any(PENDING in chunk.sequence.output_ids for chunk in coming.chunks), "a token is not known yet"
        assert coming.size.num_tokens <= self.token_budget
        numbers = [chunk.sequence.number for chunk in coming.chunks]
        assert len(set(numbers)) == len(numbers), "a sequence is in a pass twice"
        for chunk in coming.chunks:
            num_tokens = chunk.sequence.num_tokens + len(chunk.sequence.guesses)
            assert chunk.begin == chunk.sequence.num_computed < chunk.end <= num_tokens
            assert chunk.samples == (chunk.end == num_tokens)
            if coming.has_guesses:
                assert chunk.num_extra_logits == len(chunk.sequence.guesses)
                continue
            last = chunk.end - chunk.samples
            self._scored.update((chunk.sequence.number, at) for at in range(last - chunk.num_extra_logits, last))
        assert not (coming.swapped_out and coming.swapped_in), "one makes room for another's pages to come back"
        self._check_progress(coming)

    def _check_progress(self, coming: Pass) -> None:
        """The first of those admitted goes on in every pass of one set; ones that run already come before others.

        Those in the background have an order of their own, and go on if there are no others.
        """
        in_order = list(self._admitted)
        for chunk in coming.chunks:
            self._admitted.setdefault(chunk.sequence.number, chunk.sequence)
            self.num_recomputed += bool(chunk.sequence.output_ids) and chunk.begin < len(chunk.sequence.prompt_ids)
        for number in in_order:
            if self._admitted[number].state is SequenceState.FINISHED:
                del self._admitted[number]
        numbers = [chunk.sequence.number for chunk in coming.chunks]
        is_first = True
        for kind in (False, True):
            admitted = [number for number, each in self._admitted.items() if each.is_background is kind]
            own = [number for number in numbers if self._admitted[number].is_background is kind]
            assert own == [number for number in admitted if number in set(own)]
            if self.num_sets == 1 and admitted and is_first:
                assert own[0] == admitted[0]
                is_first = False

    def _resume(self, sequence: Sequence, pages: tuple[int, ...]) -> None:
        contents = self._host.pop(sequence.number)
        assert len(pages) <= len(contents)
        for page, content in zip(pages, contents[len(contents) - len(pages) :], strict=True):
            assert self._held[page] == 0, "a page that others read is written to"
            self._pages[page] = content

    def _write(self, chunk: Chunk, written: dict[int, int]) -> None:
        size, sequence = self.pool.page_size, chunk.sequence
        prefixes = self._prefixes_of(sequence, chunk.end)
        own = self._before.get(sequence.number, (sequence, []))[1]
        for index in range(chunk.begin // size, -(-chunk.end // size)):
            page = sequence.pages[index]
            assert page not in written, "two chunks write to a page"
            assert self._held[page] == (page in own[index:]), "a page that others read is written to"
            written[page] = sequence.number
            begin, end = max(chunk.begin, index * size), min(chunk.end, (index + 1) * size)
            self._pages[page][begin - index * size : end - index * size] = prefixes[begin:end]

    def _check_context(self, chunk: Chunk) -> None:
        """The pages hold the sequence's own prefix, as far back as the chunk's first token looks."""
        size, pages = self.pool.page_size, chunk.sequence.pages
        first = 0 if self.window is None else max(chunk.begin - self.window + 1, 0)
        read: list[int] = []
        for page in pages[first // size : -(-chunk.end // size)]:
            assert page != HOLE, "a page within the window was dropped"
            read += self._pages[page]
        skipped = first % size
        assert read[skipped : skipped + chunk.end - first] == self._prefixes_of(chunk.sequence, chunk.end)[first:]

    def _check_sharers(self, coming: Pass, written: dict[int, int]) -> None:
        """Who holds a page that was written in this pass comes after its writer, and has nothing in it to write."""
        places = {chunk.sequence.number: place for place, chunk in enumerate(coming.chunks)}
        for chunk in coming.chunks:
            for index, page in enumerate(chunk.sequence.pages):
                writer = written.get(page, chunk.sequence.number)
                if writer != chunk.sequence.number:
                    assert places[writer] < places[chunk.sequence.number]
                    assert chunk.begin >= (index + 1) * self.pool.page_size

    def _prefixes_of(self, sequence: Sequence, end: int) -> list[int]:
        """A number for each prefix of the sequence's first tokens."""
        known = self._prefixes.setdefault(sequence.number, [])
        for token in sequence.tokens(len(known), end):
            known.append(prefix_id(known[-1] if known else 0, token))
        return known[:end]


class HostedEngine(PagedEngine):
    """Computes on a slot that holds what was brought for the pass, and garbage else.

    Args:
        most_gap: as for `find_traffic`.
    """

    most_gap = 0

    def _bring(self, coming: Pass) -> None:
        sizes = self.pool.num_pages, self.pool.page_size
        self._traffic = find_traffic(coming.chunks, *sizes, self.most_gap, self.window)
        self._home = self._pages
        self._pages = [[-2] * self.pool.page_size for _ in range(self.pool.num_pages)]
        for run in self._traffic.coming:
            self._pages[run] = [list(page) for page in self._home[run]]

    def _let_go(self) -> None:
        for run in self._traffic.going:
            self._home[run] = [list(page) for page in self._pages[run]]
        self._pages = self._home
