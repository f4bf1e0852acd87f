"""Stands in for a `python -m zinfer` that a warm command starts, and lets the server of commands fork that process.

It has the arguments, signals and end of the process that it stands for, which is killed when it is killed. It imports
nothing heavy.
"""

import ast
import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

PYTHON: Final = "ZINFER_TESTS_PYTHON"
"""Names the interpreter for those that stand in for it."""
SERVER: Final = "ZINFER_TESTS_SERVER"
"""Says how the server is reached."""
SCRIPT: Final = Path(__file__).with_suffix(".sh")
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ends:
    """Descriptors that become a new process's stdout and stderr."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors: list[Any] = list(descriptors)

    def __getstate__(self) -> list[Any]:
        return [DupFd(each) for each in self._descriptors]

    def __setstate__(self, sent: list[Any]) -> None:
        self._descriptors = [each.detach() for each in sent]

    def take_over(self) -> None:
        for place, descriptor in enumerate(self._descriptors, start=1):
            os.dup2(descriptor, place)
            os.close(descriptor)


def use_server(reached: dict[str, Any]) -> None:
    """Let another process's server fork for this one, which starts none."""
    for name, value in reached.items():
        setattr(_forkserver, name, value)
    _forkserver._forkserver_alive_fd = os.pipe()[1]  # handed to what is forked, which hands it on
    _forkserver.ensure_running = lambda: None


def main() -> None:
    """Start the process, pass signals on to it, and end as it does."""
    words = sys.argv[3:]  # after -c: -m zinfer
    use_server(ast.literal_eval(os.environ[SERVER]))
    _, unread = os.pipe()
    resource_tracker.getfd = lambda: unread  # one would be a process more
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = (Ends(1, 2), words, Path.cwd(), dict(os.environ), limit_bytes)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=given)
    process.start()
    assert process.pid is not None
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _, pid=process.pid: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    process.join()
    assert process.exitcode is not None
    if process.exitcode < 0:
        if process.exitcode != -signal.SIGKILL:
            signal.signal(-process.exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -process.exitcode)
    os._exit(process.exitcode)


def _run(ends: Ends, words: list[str], folder: Path, environment: dict[str, str], limit_bytes: int) -> None:
    from commands import run_command

    _die_with_parent()
    run_command(ends, words, folder, environment, limit_bytes, None)


def _die_with_parent() -> None:
    """Let another process kill this one with its parent: a thread would keep it from forking ranks."""
    parent, own = multiprocessing.parent_process(), os.pidfd_open(os.getpid())
    assert parent is not None
    if not os.fork():
        os.setsid()
        if own not in wait([parent.sentinel, own]):
            signal.pidfd_send_signal(own, signal.SIGKILL)
        os._exit(0)
    os.close(own)
