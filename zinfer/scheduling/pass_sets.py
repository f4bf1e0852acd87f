"""`PassSets`: the share of one pass where several are under way at once, each of another set of sequences.

[Note: sets in flight] Stages of a pipeline compute several passes at once. No sequence goes on before its last token is
known, so they are passes of different sequences. Nothing assigns these: a pass takes only its share of the sequences
that fit together, and of the pace. The first sequences are served first, but while they are under way the next ones
are; and as the share covers all running sequences, each of them gets its turn. Those that end in a pass under way still
count: with shares of what is left alone, sequences that end together would end in passes of halves of halves. Chunks of
one prompt may follow each other at once, because every stage computes the passes in order.
"""

import math
from collections import deque

from zinfer.scheduling.queues import Running
from zinfer.scheduling.sequence import Sequence
from zinfer.scheduling.workload import Workload


class PassSets:
    """Limits a scheduler's passes.

    Args:
        count: passes that are under way at once. With one, tokens of the pass before stay on the device, and nothing is
            limited.
        workload: the scheduler's.
        max_sequences: most sequences that run at once.
    """

    def __init__(self, count: int, workload: Workload, max_sequences: int) -> None:
        self._count, self._workload, self._max_sequences = count, workload, max_sequences
        self._ended: deque[int] = deque(maxlen=count - 1)  # in each pass under way

    def note_ended(self, num_ended: int) -> None:
        """Note how many sequences end in the pass that is launched."""
        self._ended.append(num_ended)

    def num_present(self, running: Running) -> int:
        """Return the number of running sequences, with those that end in passes under way."""
        return len(running) + sum(self._ended)

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence cannot go on before its last token is known."""
        return self._count > 1 and sequence.is_awaited

    def decodes(self, running: Running, most: int) -> list[Sequence]:
        """Return the first running sequences that can go on with one token, ``most`` at most."""
        decodes = running.decodes()
        return decodes if self._count == 1 else [each for each in decodes if not each.is_awaited][:most]

    def most_rows(self, num_pages: int, running: Running) -> int:
        """Return the sequences that a pass may compute, for as many as fit ``num_pages``."""
        if self._count == 1:
            return self._max_sequences
        num_together = self._workload.num_together(num_pages, self._max_sequences)
        return max(math.ceil(max(num_together, self.num_present(running)) / self._count), 1)

    def share(self, num_tokens: int) -> int:
        """Return a pass's share of the tokens that are to be computed meanwhile."""
        return -(-num_tokens // self._count)
