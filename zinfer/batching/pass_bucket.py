"""Pads passes to a few sizes, so that captured graphs can be replayed for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zinfer.planning.pass_sizes import (
    FEWEST_REPLAYED_ROWS,
    MOST_REPLAYED_TOKENS,
    REPLAYED_TOKENS,
    padded_rows,
    padded_segments,
)
from zinfer.scheduling.schedule import Chunks

_FEWEST_TOKENS: Final = 1024  # of a context
_FEWEST_PROMPT_TOKENS: Final = 4096  # of one beside prompts: such passes have many sizes already


@dataclass(frozen=True)
class PassBucket:
    """The size that a pass is padded to.

    num_tokens: tokens; padding repeats the last ones of the largest chunk, which computes and writes the same again.
    num_segments: entries of the layout, one for each chunk; those behind the chunks have no tokens. As many tokens get
        logits.
    num_pages: of each segment's page table.
    num_decodes: as of `PagedLayout`: all segments, or None with prompts.
    """

    num_tokens: int
    num_segments: int
    num_pages: int
    num_decodes: int | None = None

    @property
    def most_queries(self) -> int:
        """As of `PagedLayout`."""
        return self.num_tokens if self.num_decodes is None else 1

    def fill(self, chunks: Chunks) -> Chunks:
        """Return the chunks, padded to the number of tokens."""
        sizes = _sizes_of(chunks)
        size, missing = max(sizes), self.num_tokens - sum(sizes)
        largest = chunks[len(sizes) - 1 - sizes[::-1].index(size)]
        again = [min(size, missing - begin) for begin in range(0, missing, size)]
        return chunks.followed_by(largest._replace(begin=largest.end - count) for count in again)


def find_bucket(
    chunks: Chunks, page_size: int, most_tokens: int = 0, most_part_tokens: int | None = None
) -> PassBucket | None:
    """Return the bucket of a pass; None if it has none, or would have several parts.

    Args:
        most_tokens: of a pass, with padding; a few decodes have a bucket anyway.
    """
    most_rows = max(FEWEST_REPLAYED_ROWS, min(most_tokens, MOST_REPLAYED_TOKENS))
    if padded_rows(len(chunks)) > most_rows or chunks.extra_logits:
        return None
    sizes = _sizes_of(chunks)
    if all(chunks.samples) and max(sizes) == 1:
        count = padded_rows(len(chunks))
        found: PassBucket | None = PassBucket(count, count, _num_pages(chunks, page_size, _FEWEST_TOKENS), count)
    else:
        found = _with_prompts(sizes, most_tokens, _num_pages(chunks, page_size, _FEWEST_PROMPT_TOKENS))
    fits = found is not None and (most_part_tokens is None or found.num_tokens <= most_part_tokens)
    return found if fits else None


def _with_prompts(sizes: Sequence[int], most_tokens: int, num_pages: int) -> PassBucket | None:
    """Return the bucket of chunks of these sizes."""
    num_tokens = next((count for count in REPLAYED_TOKENS if sum(sizes) <= count <= most_tokens), None)
    if num_tokens is None:
        return None
    num_chunks = len(sizes) + -(-(num_tokens - sum(sizes)) // max(sizes))
    num_segments = padded_segments(num_chunks)
    return None if num_segments is None else PassBucket(num_tokens, num_segments, num_pages)


def _num_pages(chunks: Chunks, page_size: int, fewest_tokens: int) -> int:
    """Return the pages of the longest context, of a power of two of tokens."""
    most_tokens = max(fewest_tokens, *chunks.ends)
    return -(-(1 << (most_tokens - 1).bit_length()) // page_size)


def _sizes_of(chunks: Chunks) -> list[int]:
    return [end - begin for begin, end in zip(chunks.begins, chunks.ends, strict=True)]
