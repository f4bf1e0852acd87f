"""`Peer`: one other rank of a job, as rank 0 knows it."""

from collections.abc import Mapping
from multiprocessing.connection import Connection

from zinfer.jobs.messages import Hello
from zinfer.jobs.progress import Load
from zinfer.jobs.prompts import Prompt
from zinfer.offload.stats import RunStats


class Peer:
    """One other rank, as rank 0 knows it.

    Attributes:
        name: for messages.
        prompts, missing: its current batch, as of `Batch` and `Records.begin_batch`.
    """

    def __init__(self, rank: int, host: str, link: Connection) -> None:
        self.rank, self.name, self.link = rank, f"rank {rank} on {host}", link
        self.hello: Hello | None = None
        self.sizes: Mapping[str, int] | None = None
        self.load = Load()
        self.prompts: tuple[Prompt, ...] = ()
        self.missing: Mapping[int, int] = {}
        self.is_busy = self.is_ended = self.has_failed = False
        self.stats: RunStats | None = None
