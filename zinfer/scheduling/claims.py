"""`Claims`: what sequences that are not in the background need of a pass before those in the background get anything.

[Note: background] A sequence in the background takes the tokens, rows and pages that the others leave. As soon as
another one waits, the background's prompt under way is preempted, and then the last running ones, until there is room;
so the other one waits for the pass under way, and no longer. Running sequences of the background for which a pass has
no token left keep their pages and wait. The background may wait as long as others keep coming.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Claims:
    """Needs of the sequences that wait or compute their prompts, without those in the background.

    num_tokens, num_pages: as far as one pass can compute. num_rows: sequences to be admitted.
    """

    num_tokens: int = 0
    num_pages: int = 0
    num_rows: int = 0

    @classmethod
    def of(cls, prompt: Sequence | None, waiting: Several[Sequence], token_budget: int, pool: PagePool) -> "Claims":
        """Sum up the needs of the prompt under way, or of the sequences that wait if there is none."""
        each = [prompt] if prompt is not None and not prompt.is_background else waiting
        num_left, num_pages, num_rows = token_budget, 0, 0
        for sequence in each:
            if not num_left:
                break
            end = min(sequence.num_tokens, sequence.num_computed + num_left)
            num_pages += pool.pages_for(end) - len(sequence.pages)
            num_left -= end - sequence.num_computed
            num_rows += sequence is not prompt
        return cls(token_budget - num_left, min(num_pages, pool.num_pages), num_rows)
