"""Exit codes, error messages and signals of the commands."""

import errno
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Final, Literal, NoReturn

import typer
from rich.console import Console

from zinfer.cli.rank_endings import LAUNCHER, Ending, note_ending, wait_for_cause
from zinfer.display import LastingStream, pass_seconds, print_text
from zinfer.errors import CheckpointError, ConfigError, JobError, PlanError, RankError, silent_rank_of
from zinfer.jobs.request import OtherRankFailed, UnusableInput
from zinfer.ranks.environment import host_name, spoken_rank
from zinfer.units import duration

Device = Literal["auto", "cuda", "cpu"]

EXIT_STOPPED: Final = 1
EXIT_UNUSABLE: Final = 2
EXIT_ROWS_FAILED: Final = 3
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_received: list[int] = []
"""Signals that have asked this process to end."""


class Interrupted(BaseException):
    """Raised when a signal asks the job to end. Not an `Exception`, so that no handler swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for this signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signal_number


@contextmanager
def exit_on_error(kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Convert exceptions to a message on stderr and an exit code.

    Args:
        kept: returns a message on what the same command can resume from; called after everything is closed. None: the
            command prints its result on stdout. Failing to write there is an error, except for a closed pipe.
    """
    try:
        yield
        sys.stdout.flush()
        failure = sys.stdout.failure if kept is None and isinstance(sys.stdout, LastingStream) else None
        if isinstance(failure, OSError) and not isinstance(failure, BrokenPipeError):
            raise OSError(failure.errno, failure.strerror, "stdout")
    except OtherRankFailed as error:
        conclude(f"error: {error}", EXIT_STOPPED, is_own=False)
    except (ConfigError, CheckpointError, PlanError, UnusableInput) as error:
        conclude(f"error: {error}", EXIT_UNUSABLE)
    except Interrupted as interruption:
        resumes = f" {kept()}; run the same command again to go on." if kept else ""
        name = signal.Signals(interruption.signal_number).name
        conclude(f"{name}: stopped.{resumes}", interruption.exit_code, is_own=False)
    except (OSError, JobError, RankError) as error:
        if (silent := silent_rank_of(error)) is not None:
            how = f". {kept()}; run the same command again to go on" if kept else ""
            conclude(f"error: {silent}{how}", EXIT_STOPPED, silent_rank=silent.rank)
        if isinstance(error.__cause__, RuntimeError) and not isinstance(error, RankError):
            traceback.print_exception(error.__cause__)
        how = ""
        if kept is not None and isinstance(error, OSError):
            remedy = "make room" if error.errno in _FULL else "check the disk"
            how = f". {kept()}; {remedy} and run the same command again to go on"
        conclude(f"error: {error}{how}", EXIT_STOPPED)


def conclude(text: str, exit_code: int, *, is_own: bool = True, silent_rank: int | None = None) -> NoReturn:
    """Say why the command ends, and end it. Ranks leave it to their launcher; without one, rank 0 speaks for all.

    Args:
        is_own: whether the cause lies in this process, not in a signal or another rank.
        silent_rank: one that has not answered. If it is rank 0, rank 1 speaks for all.
    """
    rank = spoken_rank()
    if LAUNCHER in os.environ:
        note_ending(Ending(rank or 0, host_name(), text, exit_code, is_own, silent_rank))
        if not is_own and exit_code == EXIT_STOPPED and signal.SIGTERM not in _received:  # another rank failed
            wait_for_cause()
    elif rank in (None, int(silent_rank == 0)) or (is_own and silent_rank is None):
        say(text)
    if silent_rank is not None:  # threads of torch wait for it, and would abort the process at its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code) from None


def say(text: str) -> None:
    """Print a message on stderr."""
    print_text(Console(stderr=True), f"zinfer: {text}")


def process_seconds() -> float:
    """Return the seconds since this process began, or the one that launched it as a rank; to a hundredth.

    By the kernel's clock: psutil's times of processes are off by up to a second, since its boot time is in whole ones.
    """
    stat = Path(f"/proc/{os.getppid() if LAUNCHER in os.environ else 'self'}/stat").read_text()
    ticks = int(stat.rpartition(")")[2].split()[19])  # field 22, of which the second may hold blanks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class _Interrupt:
    """The handler of `raise_on_signals`. The engine calls `announce` at once where it holds a signal back."""

    def __init__(self, makes_passes: bool) -> None:
        self._makes_passes = makes_passes
        self._is_announced = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        for each in ending_signals():
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else _end_now)
        _received.append(number)
        self.announce(number)
        raise Interrupted(number)

    def announce(self, number: int) -> None:
        """Say once that the pass under way is waited for; of several ranks, rank 0 says it.

        A launcher passes Ctrl-C on, and sends SIGTERM also when another rank has failed.
        """
        is_launchers = LAUNCHER in os.environ and number == signal.SIGTERM
        if not self._makes_passes or self._is_announced or is_launchers or spoken_rank() not in (None, 0):
            return
        self._is_announced = True
        seconds = pass_seconds()
        pass_s = f" (up to {duration(seconds)})" if seconds else ""
        with suppress(OSError):  # not by print, which may be under way
            os.write(2, f"zinfer: stopping after this pass{pass_s}; press Ctrl-C again to stop now\n".encode())


@contextmanager
def raise_on_signals(*, makes_passes: bool = False) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted` once.

    A second SIGINT or SIGTERM removes temporary folders and kills the process. Further SIGHUPs are ignored: a closing
    terminal sends several.

    Args:
        makes_passes: the command waits for the pass that it is in, perhaps for hours, and says so at once.
    """
    with _handled_by(_Interrupt(makes_passes)):
        yield


def _end_now(number: int, frame: FrameType | None) -> None:
    """Remove this process's temporary folders, which may hold gigabytes, and let the signal end it."""
    for each in gc.get_objects():  # whoever made them
        if isinstance(each, TemporaryDirectory):
            with suppress(OSError):
                each.cleanup()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def importing(clean_up: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Signals end the process at once. Use for imports that take seconds, before any work begins.

    An exception raised inside an import may be swallowed, or leave a partial module that cannot be loaded again.
    Nothing that is imported is garbage: to look for it again and again would take an eighth of the time, and stop the
    command for a third of a second whenever all objects are looked through later.

    Args:
        clean_up: called before a signal ends the process.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        said = f"zinfer: {signal.Signals(number).name}: stopped while starting, before anything was read or written.\n"
        if LAUNCHER not in os.environ:
            with suppress(OSError):
                os.write(2, said.encode())
        clean_up()
        os._exit(Interrupted(number).exit_code)

    collects, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        with _handled_by(end):
            yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if collects:
            gc.enable()


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask to end. SIGHUP stays ignored under nohup."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_deaf else [signal.SIGHUP])]


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], NoReturn]) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, each in former.items():
            signal.signal(number, each)
