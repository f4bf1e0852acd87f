"""What a job completes its prompts with: continuous batching where the family allows it, padded batches elsewhere; and
what encodes them."""

from collections.abc import Collection, Generator, Sequence
from typing import Any, Protocol, TypeAlias

from zinfer.batching.completion import Completion
from zinfer.jobs.encoding import Encoding
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.timeline import Load
from zinfer.offload.stats import RunStats

Answer: TypeAlias = tuple[Completion, ...] | Encoding


class Completer(Protocol):
    """Completes prompts; what it computes depends on these prompts and on its sizes, never on earlier calls.

    Attributes:
        predicted_s: seconds that the plan gives what was completed so far.
        sizes: of its passes and its cache, kept for whoever goes on with the job.
    """

    predicted_s: float

    @property
    def sizes(self) -> dict[str, int]: ...

    @property
    def plan(self) -> Any: ...

    def forecast(self, prompts: Sequence[Prompt]) -> tuple[str, float]:
        """What completing these prompts takes, in words, and the new tokens a second."""
        ...

    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, Answer], None, None]:
        """Each prompt's completions as soon as all of them are there, or its encoding.

        Args:
            wanted: identities of the prompts that are needed; others may be left out where that changes nothing.
        """
        ...

    def stats(self) -> RunStats: ...

    def load(self) -> Load: ...

    def close(self) -> None: ...
