"""What a job completes its prompts with: continuous batching where the family allows it, padded batches elsewhere; and
what encodes them."""

from collections.abc import Collection, Generator, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from zinfer.jobs.progress import Forecast, Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.records import Encoding
from zinfer.jobs.timeline import Load
from zinfer.offload.stats import RunStats
from zinfer.requests.completion import Completion

Answer: TypeAlias = tuple[Completion, ...] | Encoding


class Completer(Protocol):
    """Completes prompts; what it computes depends on these prompts and on its sizes, never on earlier calls.

    Attributes:
        predicted_s: seconds that the plan gives what was completed so far.
        sizes: of its passes and its cache, kept for a run that resumes the job.
    """

    predicted_s: float

    @property
    def sizes(self) -> dict[str, int]: ...

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        """What completing these prompts takes."""
        ...

    def rows_together(self, prompts: Sequence[Prompt]) -> int:
        """How many rows had better share passes, these being the most: what a kill costs is bounded by it."""
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


class CountedEngine(Protocol):
    """What every completer over one engine needs of it."""

    def stats(self) -> Any: ...

    def destroy(self) -> None: ...


EngineT = TypeVar("EngineT", bound=CountedEngine)


class EngineCompleter(Generic[EngineT]):
    """What completers over one engine have in common.

    Args:
        meter: told of what is computed.
    """

    def __init__(self, engine: EngineT, meter: Meter) -> None:
        self._engine = engine
        self._meter = meter
        self.sizes: dict[str, int] = {}
        self.predicted_s = 0.0

    def rows_together(self, prompts: Sequence[Prompt]) -> int:
        """All of them: they are few, or every pass is one of its own."""
        return len(prompts)

    def stats(self) -> RunStats:
        found: RunStats = self._engine.stats()
        return found

    def close(self) -> None:
        self._engine.destroy()
