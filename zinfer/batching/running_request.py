"""A request under way: its sequence, the sampler's view of it, and where it ends."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from zinfer.batching.known_tokens import EVERYTHING
from zinfer.batching.request import Request
from zinfer.requests.completion import Completion, not_finite
from zinfer.requests.logprobs import Logprobs
from zinfer.sampling.sampler import Row
from zinfer.scheduling.sequence import Sequence, SequenceState


@dataclass
class RunningRequest:
    """A request under way.

    Attributes:
        logprobs: of its tokens so far.
        prompt_logprobs: by position in the prompt, None where they are not known; None if nobody asks for them.
        num_needed: tokens, from the first on, that are to be computed; see [Note: known tokens] in `known_tokens`.
    """

    request: Request
    sequence: Sequence
    row: Row
    num_needed: int = EVERYTHING
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None

    def __post_init__(self) -> None:
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.sequence.prompt_ids)

    def next_known(self, num_tokens: int) -> list[int]:
        """Return its next tokens, if they are known, with any token behind the last one; else nothing."""
        known_ids, begin = self.request.known_ids, len(self.sequence.output_ids)
        if known_ids is None:
            return []
        found = known_ids[begin : begin + num_tokens].tolist()
        return found + [0] * (num_tokens - len(found))

    def add_scores(self, begin: int, found: Iterable[Logprobs | None]) -> None:
        """Note the log-probabilities of the prompt's tokens from position ``begin`` on."""
        assert self.prompt_logprobs is not None
        for position, each in enumerate(found, begin):
            self.prompt_logprobs[position] = each

    @property
    def may_be_guessed(self) -> bool:
        """Whether a next pass may verify guesses: it runs, its tokens are known, and no grammar decides on them."""
        sequence = self.sequence
        is_running = sequence.state is SequenceState.RUNNING and bool(sequence.output_ids)
        return is_running and not sequence.is_awaited and self.row.matcher is None

    @property
    def scores(self) -> tuple[Logprobs | None, ...] | None:
        """The log-probabilities of the prompt's tokens, if they were asked for; None before the first scored one."""
        return None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)

    @property
    def is_well_scored(self) -> bool:
        """Whether the prompt's tokens all have log-probabilities; not if logits were no finite numbers."""
        start = self.request.params.prompt_logprobs_start
        return self.prompt_logprobs is None or None not in self.prompt_logprobs[start:]

    def end(self) -> tuple[str, str | None] | None:
        """Return the finish reason, and the error if any, if the sequence ends with its last token; else None.

        Call once for each token if its output has a grammar. A token that was drawn although none could follow, or
        that the grammar cannot go on behind, is dropped.
        """
        output_ids, matcher = self.sequence.output_ids, self.row.matcher
        reason = None
        if not self.request.params.most_new_tokens:  # only the prompt's scores are wanted
            output_ids.clear()
            self.logprobs.clear()
            return "length", None
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

    def completion(self, reason: str, error: str | None = None) -> Completion:
        """Return what is known so far as a completion.

        Args:
            reason: of its end; "error" if its prompt could not be scored.
            error: None if there was none.
        """
        request, num_known = self.request, self.sequence.num_known - len(self.sequence.prompt_ids)
        if error is None and reason != "cancelled" and not self.is_well_scored:
            reason, error = "error", not_finite(None)
        output_ids, criteria = self.sequence.output_ids[:num_known], request.stop_criteria
        return Completion(
            request.prompt_index,
            request.sample_index,
            criteria.text(output_ids) if output_ids else "",
            tuple(output_ids),
            reason,
            None if request.params.logprobs is None else tuple(self.logprobs),
            error,
            criteria.stop_reason(output_ids) if reason == "stop" and output_ids else None,
            self.scores if error is None and reason != "cancelled" else None,
            None if request.params.is_greedy else request.seed,
            tuple(request.prompt_ids),
        )
