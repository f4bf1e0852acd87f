"""What a bench found, on one process or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zinfer.jobs.comparison import Compared
from zinfer.offload.stats import RunStats
from zinfer.planning.job_estimator import JobPrediction
from zinfer.ranks.mesh import Mesh


@dataclass(frozen=True)
class BenchResult:
    """What a bench found.

    Attributes:
        device: the device's name.
        predicted: for these prompts, before any of them ran.
        seconds: from the first pass's beginning to the last completion.
        start_s: seconds to write random weights, to build the model and to fill its homes.
        num_prompt_tokens, num_new_tokens: of all rows.
        stats: bytes moved and stalls.
        tier_bytes: bytes of the slabs by home.
        busy_s: seconds of work of each resource in the passes that ran, at the known rates.
        file, file_bytes: the file that all weights were read from.
        first_pass_s: of ``seconds``.
        phase_s: seconds of the phases before the passes, by name; of a process also "starting" before them and "end".
        process_s: of the whole process; 0: not in one of its own.
        held_bytes, context_bytes: device memory that was held to enforce the cap, and used by CUDA's context.
        compared: the rivals.
        ranks: of each rank, if several shared the rows; the other fields are then of all, but for what is of a machine
            (``device``, ``file``, ``held_bytes``, ``context_bytes``), ``busy_s`` and ``stats``, which are rank 0's.
    """

    model: str
    device: str
    num_rows: int
    predicted: JobPrediction
    seconds: float
    start_s: float
    num_prompt_tokens: int
    num_new_tokens: int
    stats: RunStats
    tier_bytes: Mapping[str, int]
    busy_s: Mapping[str, float]
    file: Path
    file_bytes: int
    first_pass_s: float = 0.0
    phase_s: Mapping[str, float] = field(default_factory=dict)
    process_s: float = 0.0
    held_bytes: int = 0
    context_bytes: int = 0
    compared: tuple[Compared, ...] = ()
    ranks: "tuple[BenchResult, ...]" = ()

    @classmethod
    def together(cls, ranks: "Sequence[BenchResult]", mesh: Mesh) -> "BenchResult":
        """Return what ranks found that ran at the same time; those of a group have the same rows."""
        first, predicted = ranks[0], [each.predicted for each in ranks]
        leading = [each for rank, each in enumerate(ranks) if mesh.ranks_in_step(rank)[0] == rank]
        return replace(
            first,
            num_rows=sum(each.num_rows for each in leading),
            predicted=replace(
                first.predicted,
                seconds=max(each.seconds for each in predicted),
                tokens_per_s=sum(each.predicted.tokens_per_s for each in leading),
            ),
            seconds=max(each.seconds for each in ranks),
            start_s=max(each.start_s for each in ranks),
            num_prompt_tokens=sum(each.num_prompt_tokens for each in leading),
            num_new_tokens=sum(each.num_new_tokens for each in leading),
            tier_bytes={tier: sum(each.tier_bytes[tier] for each in ranks) for tier in first.tier_bytes},
            file_bytes=sum(each.file_bytes for each in ranks),
            ranks=tuple(ranks),
        )

    def of_process(self, starting_s: float, process_s: float) -> "BenchResult":
        """Return the result with the time of the whole process.

        Args:
            starting_s: from the process's start to the bench's.
            process_s: from the process's start until now, when all is closed.
        """
        return replace(self, phase_s={"starting": starting_s, **self.phase_s}, process_s=process_s)

    @property
    def all_phase_s(self) -> dict[str, float]:
        """Seconds of each phase, of the first pass and of all others, and of what is left of the whole as the end."""
        passes_s = {"first pass": self.first_pass_s, "passes": self.seconds - self.first_pass_s}
        found = {name: seconds for name, seconds in self.phase_s.items() if name not in ("running", "end")} | passes_s
        return found | {"end": max(self.whole_s - sum(found.values()), 0.0)}

    @property
    def whole_s(self) -> float:
        """Seconds of the process; of a bench within another program, of its phases."""
        return self.process_s or sum(self.phase_s.values())

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second."""
        return self.num_new_tokens / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second, over the same seconds."""
        return self.num_prompt_tokens / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """Seconds that link, disk and compute were busy, at their known rates, as shares of `seconds`."""
        names = {"link": "link", "disk": "disk", "compute": "matrix work"}
        return {name: self.busy_s[term] / self.seconds for name, term in names.items()}
