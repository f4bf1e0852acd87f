"""How the ranks of a command ended: each notes it in a file of their launcher, which says one thing for all."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from zinfer.errors import JobError
from zinfer.nvme.pool import start_thread
from zinfer.ranks.environment import host_name
from zinfer.ranks.sockets import SILENCE_S

MOST_STOPPED_S: Final = SILENCE_S + 5
"""In which the launcher lets the other ranks find one that is stopped: they know what it holds up."""
LAUNCHER: Final = "ZINFER_RANK_ENDINGS"
"""Names the file; set by the launcher."""
_MOST_WAIT_S: Final = 20.0
_PAUSE_S: Final = 0.05
_LOOK_S: Final = 0.5


@dataclass(frozen=True)
class Ending:
    """Why a rank ended early.

    Attributes:
        text: for the user.
        is_own: whether the cause lies in this rank, not in a signal or another rank.
        silent_rank: one that has not answered, as this rank says, for which no other needs to speak.
    """

    rank: int
    host: str
    text: str
    exit_code: int
    is_own: bool
    silent_rank: int | None = None

    @property
    def told(self) -> str:
        """The text, with the rank unless it is 0, which speaks for the whole job, or the text names another."""
        speaks_for_all = self.rank == 0 or self.silent_rank is not None
        return self.text if speaks_for_all else f"rank {self.rank} on {self.host}: {self.text}"


def note_ending(ending: Ending) -> None:
    """Append to the launcher's file."""
    with open(os.environ[LAUNCHER], "ab", buffering=0) as file:
        file.write(json.dumps(asdict(ending)).encode() + b"\n")


def read_endings(file: Path) -> list[Ending]:
    """Return what the ranks noted, in the order of time."""
    return [Ending(**json.loads(line)) for line in file.read_bytes().splitlines()]


def wait_for_cause() -> None:
    """Wait until the rank that ended the others has noted why, some seconds at most.

    The launcher ends all ranks by SIGTERM once one has ended, and one that failed may take longer than those which
    heard of it: it has files to close and memory to free. Who is asked to end need not wait: the first rank has ended,
    and has noted what it has to say, which is nothing if it was killed.
    """
    end_s = time.monotonic() + _MOST_WAIT_S
    while time.monotonic() < end_s:
        if any(each.is_own or each.exit_code > 128 for each in read_endings(Path(os.environ[LAUNCHER]))):
            return
        time.sleep(_PAUSE_S)


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """Return the ending to tell: one that names a silent rank, else rank 0's, which knows of the others'.

    Not rank 0's if a signal ended it.
    """
    silent = [each for each in endings if each.silent_rank is not None]
    told = [each for each in endings if each.rank == 0 and each.exit_code < 128]
    own = [each for each in endings if each.is_own]
    signalled = [each for each in endings if each.exit_code > 128]
    return next(iter([*silent, *told, *own, *signalled, *endings]), None)


@contextmanager
def killing_silent_ranks(file: Path, num_ranks: int, kept: Callable[[], str]) -> Iterator[None]:
    """Kill this process's ranks that others have noted as silent, or that have been stopped for long.

    A process that is stopped or hangs does not hear the launcher's SIGTERM, and the SIGKILL that follows comes late.
    Ranks watch each other only from when they have joined until one is done with its work.

    Args:
        file: of `note_ending`.
        kept: returns a message on what the same command can resume from.

    Raises:
        JobError: they could not be watched any more, and were killed for that.
    """
    over = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        ranks: dict[int, psutil.Process] = {}
        num_looks: Counter[int] = Counter()  # not seconds: those in which the launcher itself was stopped do not count
        while not over.wait(_LOOK_S):
            ranks = ranks if len(ranks) == num_ranks else _own_ranks()
            silent = {each.silent_rank for each in read_endings(file)}
            for rank, process in ranks.items():
                with suppress(psutil.Error, ProcessLookupError):
                    num_looks[rank] = num_looks[rank] + 1 if process.status() == psutil.STATUS_STOPPED else 0
                    is_stopped = num_looks[rank] * _LOOK_S >= MOST_STOPPED_S
                    if is_stopped and rank not in silent:
                        host = host_name()
                        text = f"error: rank {rank} on {host} was stopped for {MOST_STOPPED_S} s. {kept()}"
                        note_ending(Ending(rank, host, text, 1, is_own=False, silent_rank=rank))
                    if (is_stopped or rank in silent) and process.is_running():
                        os.killpg(process.pid, signal.SIGKILL)  # each rank has a session of its own

    def fail(failure: BaseException) -> None:
        failures.append(failure)
        while not over.is_set():  # also those that start later
            for process in _own_ranks().values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            over.wait(_LOOK_S)

    looking = start_thread("zinfer-silent-ranks", look, fail)
    try:
        yield
    finally:
        over.set()
        looking.join()
        if failures:
            why = f"{type(failures[0]).__name__}: {failures[0]}"
            raise JobError(f"the ranks could not be watched and were ended ({why}). {kept()}") from failures[0]


def _own_ranks() -> dict[int, psutil.Process]:
    """Return the ranks that this process has started, by number."""
    found = {}
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if (rank := process.environ().get("RANK", "")).isdecimal():
                found[int(rank)] = process
    return found
