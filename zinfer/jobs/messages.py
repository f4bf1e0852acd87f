"""What rank 0 of a job and the other ranks send each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from zinfer.jobs.completer import Answer
from zinfer.jobs.progress import Load
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.summary import JobSummary
from zinfer.offload.stats import RunStats
from zinfer.planning.job_sizes import Sizes
from zinfer.weights.range_sums import FileSums, NewSums


@dataclass(frozen=True)
class Hello:
    """From a rank, first: the fingerprint of its checkpoint, and the versions of its software."""

    fingerprint: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Open:
    """From rank 0: load the model, planned for the first prompts; arguments as for `ExecutionMode.load`.

    Attributes:
        sums: checksums of the weights that the job began with; None: none are kept.
    """

    prompts: tuple[Prompt, ...]
    sizes: Sizes
    parallel: Mapping[str, int]
    sums: Mapping[str, FileSums] | None


@dataclass(frozen=True)
class Ready:
    """From a rank: its model is loaded, with these sizes of its own, and so many pages in its KV cache."""

    sizes: Sizes
    num_pages: int


@dataclass(frozen=True)
class WantSums:
    """From rank 0, which is about to write rows: tell what was read; answered also while a batch is computed."""


@dataclass(frozen=True)
class Sums:
    """From a rank: checksums of the weights that it has read since it last told of them."""

    found: tuple[NewSums, ...]


@dataclass(frozen=True)
class Begin:
    """From rank 0: ask for batches, and answer; the ranks that follow this one compute them too."""


@dataclass(frozen=True)
class Idle:
    """From the first of the ranks that share passes: it has finished its batch, if any, and takes another one."""

    load: Load


@dataclass(frozen=True)
class Work:
    """From rank 0: a batch, and the places of the prompts whose rows are missing."""

    prompts: tuple[Prompt, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Answered:
    """From a rank: the answer to the prompt at a place of its batch."""

    place: int
    answer: Answer
    load: Load


@dataclass(frozen=True)
class End:
    """From rank 0: all rows are computed, by this rank and the others."""


@dataclass(frozen=True)
class Ended:
    """From a rank that has no more to compute: what it did; None: nothing, not even load the model."""

    stats: RunStats | None


@dataclass(frozen=True)
class Finished:
    """From rank 0, last: the job's summary."""

    summary: JobSummary


@dataclass(frozen=True)
class Left:
    """From rank 0, which ends early and tells the user why."""


class Cause(IntEnum):
    """Why a rank ended early; of several, the first of this order is told."""

    REFUSAL = 0  # its files are not those that the job began with
    GONE = 1  # without a word
    ERROR = 2
    SIGNAL = 3
    OTHER_RANK = 4  # another one, as far as it knows


@dataclass(frozen=True)
class Failed:
    """From a rank: it ends early."""

    cause: Cause
    text: str
