"""How the ranks of a command ended: each notes it in a file of their launcher, which says one thing for all."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from zinfer.ranks.environment import host_name
from zinfer.ranks.sockets import SILENCE_S

MOST_STOPPED_S: Final = SILENCE_S + 5
"""In which the launcher lets the other ranks find one that is stopped: they know what it holds up."""
LAUNCHER: Final = "ZINFER_RANK_ENDINGS"
"""Names the file; set by the launcher."""
_MOST_WAIT_S: Final = 20.0
_PAUSE_S: Final = 0.05
LOOK_S: Final = 0.5
"""Between two looks of `SilenceWatch`."""


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
    add_ending(Path(os.environ[LAUNCHER]), ending)


def add_ending(file: Path, ending: Ending) -> None:
    """Append to a file of endings, which other processes may append to."""
    with file.open("ab", buffering=0) as opened:
        opened.write(json.dumps(asdict(ending)).encode() + b"\n")


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


class SilenceWatch:
    """Kills ranks that others have noted as silent, or that have been stopped for long.

    A process that is stopped or hangs does not hear the launcher's SIGTERM, and the SIGKILL that follows comes late.
    Ranks watch each other only from when they have joined until one is done with its work.

    Args:
        file: of `note_ending`.
        kept: returns a message on what the same command can resume from.
    """

    def __init__(self, file: Path, kept: Callable[[], str]) -> None:
        self._file, self._kept = file, kept
        # Not seconds: those in which the launcher itself was stopped do not count.
        self._num_looks: Counter[int] = Counter()

    def look(self, running: Mapping[int, int]) -> None:
        """Look at the processes of ranks; called every `LOOK_S`."""
        endings = read_endings(self._file)
        silent = {each.silent_rank for each in endings}
        for rank, pid in running.items():
            is_stopped_now = psutil.Process(pid).status() == psutil.STATUS_STOPPED
            self._num_looks[rank] = self._num_looks[rank] + 1 if is_stopped_now else 0
            is_stopped = self._num_looks[rank] * LOOK_S >= MOST_STOPPED_S
            if is_stopped and rank not in silent:
                host = host_name()
                text = f"error: rank {rank} on {host} was stopped for {MOST_STOPPED_S} s. {self._kept()}"
                add_ending(self._file, Ending(rank, host, text, 1, is_own=False, silent_rank=rank))
            if is_stopped or rank in silent:
                os.kill(pid, signal.SIGKILL)  # not yet reaped; its session may not be there yet
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
