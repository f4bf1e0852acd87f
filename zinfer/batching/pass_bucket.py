"""Pads passes to a few sizes, so that captured graphs can be replayed for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from zinfer.planning.pass_sizes import MOST_REPLAYED_TOKENS, round_up
from zinfer.scheduling.schedule import Chunk, Chunks

_MOST_ROWS: Final = 64  # each graph keeps the logits of its rows
_ROWS_STEP: Final = 8
_FEWEST_TOKENS: Final = 1024  # of a context
_FEWEST_PROMPT_TOKENS: Final = 4096  # of one beside prompts: such passes have many sizes already
_SEGMENTS: Final = (16, 64)
_TOKENS: Final = (64, 128, 256, 512, MOST_REPLAYED_TOKENS)


@dataclass(frozen=True)
class DecodeBucket:
    """The size that a decode pass is padded to.

    num_rows: rows; padding rows repeat the last one, which computes and writes the same again.
    num_pages: of each row's page table.
    """

    num_rows: int
    num_pages: int

    most_queries: ClassVar = 1

    @property
    def num_segments(self) -> int:
        """Entries of the layout."""
        return self.num_rows

    @property
    def num_decodes(self) -> int:
        """As of `PagedLayout`."""
        return self.num_rows

    def fill(self, chunks: Sequence[Chunk]) -> Chunks:
        """Return the chunks, padded by repeating the last one."""
        return Chunks([*chunks, *[chunks[-1]] * (self.num_rows - len(chunks))])


@dataclass(frozen=True)
class PromptBucket:
    """The size that a pass with prompts is padded to.

    num_tokens: tokens; padding repeats the last ones of the largest chunk, which computes and writes the same again.
    num_segments: entries of the layout, one for each chunk; those behind the chunks have no tokens. As many tokens get
        logits.
    num_pages: of each segment's page table.
    """

    num_tokens: int
    num_segments: int
    num_pages: int

    num_decodes: ClassVar = None

    @property
    def most_queries(self) -> int:
        """As of `PagedLayout`."""
        return self.num_tokens

    def fill(self, chunks: Sequence[Chunk]) -> Chunks:
        """Return the chunks, padded to the number of tokens."""
        largest = max(chunks, key=_size_of)
        missing, size = self.num_tokens - sum(map(_size_of, chunks)), _size_of(largest)
        again = [min(size, missing - begin) for begin in range(0, missing, size)]
        repeated = [largest._replace(begin=largest.end - count, samples=False) for count in again]
        return Chunks([*chunks, *repeated])


PassBucket: TypeAlias = DecodeBucket | PromptBucket


def find_bucket(
    chunks: Chunks, page_size: int, most_prompt_tokens: int = 0, most_part_tokens: int | None = None
) -> PassBucket | None:
    """Return the bucket of a pass; None if it has none, or would have several parts.

    Args:
        most_prompt_tokens: of a pass with prompts.
    """
    if len(chunks) > _MOST_ROWS or chunks.extra_logits:
        return None
    if all(chunks.samples) and sum(chunks.ends) - sum(chunks.begins) == len(chunks):
        bucket: PassBucket = DecodeBucket(
            round_up(len(chunks), _ROWS_STEP), _num_pages(chunks, page_size, _FEWEST_TOKENS)
        )
        num_tokens = bucket.num_segments
    else:
        found = _prompt_bucket(chunks, page_size, most_prompt_tokens)
        if found is None:
            return None
        bucket, num_tokens = found, found.num_tokens
    return None if most_part_tokens is not None and num_tokens > most_part_tokens else bucket


def _prompt_bucket(chunks: Chunks, page_size: int, most_tokens: int) -> PromptBucket | None:
    sizes = [end - begin for begin, end in zip(chunks.begins, chunks.ends, strict=True)]
    num_tokens = next((count for count in _TOKENS if sum(sizes) <= count <= most_tokens), None)
    if num_tokens is None:
        return None
    num_repeated = -(-(num_tokens - sum(sizes)) // max(sizes))
    num_segments = next((count for count in _SEGMENTS if len(chunks) + num_repeated <= count), None)
    if num_segments is None:
        return None
    return PromptBucket(num_tokens, num_segments, _num_pages(chunks, page_size, _FEWEST_PROMPT_TOKENS))


def _num_pages(chunks: Chunks, page_size: int, fewest_tokens: int) -> int:
    """Return the pages of the longest context, of a power of two of tokens."""
    most_tokens = max(fewest_tokens, *chunks.ends)
    return -(-(1 << (most_tokens - 1).bit_length()) // page_size)


def _size_of(chunk: Chunk) -> int:
    return chunk.end - chunk.begin
