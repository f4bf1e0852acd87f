"""Makes the chunks of a pass that verifies guesses; see [Note: guesses] in `speculation`."""

from collections.abc import Mapping, Sequence

from zinfer.scheduling.page_allocator import PageAllocator
from zinfer.scheduling.schedule import Chunk, Chunks
from zinfer.scheduling.sequence import Sequence as TokenSequence


def chunks_with_guesses(
    decodes: Sequence[TokenSequence],
    guesses: Mapping[int, tuple[int, ...]],
    most_tokens: int,
    most_pages: int,
    allocator: PageAllocator,
) -> Chunks | None:
    """Return chunks of sequences' last tokens and the guesses behind them, which become `Sequence.guesses`.

    A guess is left out if its token or page is one too many, or if it would be a sequence's last new token, which
    nothing is computed behind.

    Args:
        decodes: have pages for their last tokens.
        guesses: by the sequences' numbers.
        most_tokens, most_pages: for all guesses.

    Returns:
        None: no guess is left.
    """
    chunks = Chunks()
    for sequence in decodes:
        begin, num_pages = sequence.num_computed, len(sequence.pages)
        num_left = sequence.max_new_tokens - len(sequence.output_ids) - 1
        own = guesses.get(sequence.number, ())[: max(min(num_left, most_tokens), 0)]
        end = allocator.extend_idle(sequence, begin + 1 + len(own), most_pages)
        sequence.guesses = own[: end - begin - 1]
        most_tokens -= len(sequence.guesses)
        most_pages -= len(sequence.pages) - num_pages
        chunks.append(Chunk(sequence, begin, begin + 1 + len(sequence.guesses), True, len(sequence.guesses)))
    return chunks if chunks.extra_logits else None
