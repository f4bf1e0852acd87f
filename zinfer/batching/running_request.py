"""A request under way: its sequence, the sampler's view of it, and where it ends."""

from dataclasses import dataclass, field

from zinfer.batching.request import Request
from zinfer.requests.logprobs import Logprobs
from zinfer.sampling.sampler import Row
from zinfer.scheduling.sequence import Sequence


@dataclass
class RunningRequest:
    """A request under way."""

    request: Request
    sequence: Sequence
    row: Row
    logprobs: list[Logprobs] = field(default_factory=list)

    def end(self) -> tuple[str, str | None] | None:
        """Return the finish reason, and the error if any, if the sequence ends with its last token; else None.

        Call once for each token if its output has a grammar. A token that was drawn although none could follow, or
        that the grammar cannot go on behind, is dropped.
        """
        output_ids, matcher = self.sequence.output_ids, self.row.matcher
        reason = None
        if matcher is None or not matcher.is_over:
            reason = self.request.stop_criteria.reason(output_ids)
            if matcher is not None and reason != "stop":
                matcher.accept(output_ids[-1])
                reason = "stop" if matcher.is_complete else reason
            if matcher is None or matcher.problem is None:
                return None if reason is None else (reason, None)
        output_ids.pop()
        del self.logprobs[len(output_ids) :]
        return ("stop", None) if matcher.problem is None else ("error", matcher.problem)
