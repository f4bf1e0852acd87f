"""Runs a command in its own process with a time limit; describes how it failed."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# An exception's own line: not indented, a name, perhaps a colon and a message; torch puts the rank before it.
_EXCEPTION: Final = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:: .*)?)$", re.MULTILINE)
STOPPED: Final = "stopped at its limit of "
"""What `run_limited` returns of a command that took too long begins so."""
_TRACEBACK: Final = "Traceback (most recent call last):"


def run_limited(command: Sequence[str], log: Path, limit_s: float) -> str | None:
    """Run a command and return None, or in words why it did not exit with 0. Its output goes to ``log``.

    What has to be stopped is killed together with the processes that it started.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"{STOPPED}{limit_s:g} s, after: {last_error(log.read_text(errors='replace'))}"
        finally:
            if process.poll() is None:  # not reaped yet: its number is still that of its group
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return None
    end = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return f"{end}: {last_error(log.read_text(errors='replace'))}"


def last_error(log: str) -> str:
    """The exception that the last traceback of a log ends with, else the log's last line that is not empty."""
    _, found, traceback = log.rpartition(_TRACEBACK)
    exception = _EXCEPTION.search(traceback) if found else None
    if exception:
        return exception[1]
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
