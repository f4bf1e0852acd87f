"""A subprocess that does one kind of work within limits of time and memory."""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from zinfer.errors import JobError

_SCRIPT: Final = Path(__file__).with_name("worker_process.py")
_QUIET: Final = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


class LimitedWorker:
    """Answers requests in a subprocess, which starts with the first request and restarts if one ended it.

    Thread-safe; requests wait for one another.

    Args:
        task: one of those in `worker_process`.
        does: what the process does, for messages, such as "renders chats".
        most_cpu_s: limit of CPU seconds per request.
    """

    def __init__(self, task: str, does: str, most_cpu_s: int) -> None:
        self._task, self._does, self._most_cpu_s = task, does, most_cpu_s
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., LimitedWorker] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request of one line of JSON; its "failed" says what ended the work, if anything did.

        Raises:
            JobError: the process does not start.
            RuntimeError: the worker was closed.
        """
        with self._lock:
            return self._ask(request)

    def close(self) -> None:
        """End the process for good, even while it works for another thread."""
        self._is_closed = True
        self._stop()

    def _ask(self, request: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
        except BrokenPipeError:
            said = ""
        except BaseException:  # Ctrl-C: the next request must not read the answer to this one
            self._stop()
            raise
        if said.endswith("\n"):
            answer: dict[str, Any] = json.loads(said)
            return answer
        self._stop()
        if process.returncode == -signal.SIGXCPU:
            return {"failed": f"it computes for more than {self._most_cpu_s} s"}
        return {"failed": f"it ended the process that {self._does} (exit code {process.returncode})"}

    def _running(self) -> "subprocess.Popen[str]":
        if self._is_closed:
            raise RuntimeError(f"the process that {self._does} was closed")
        if self._process is None:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), self._task, str(self._most_cpu_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C goes to the caller, which ends this process
                env={**os.environ, **_QUIET},
            )
            self._process, self._end = process, weakref.finalize(self, _end, process)
            try:
                assert process.stdout is not None
                is_ready = process.stdout.readline() == "ready\n"
            except BaseException:
                self._stop()
                raise
            if not is_ready:
                self._stop()
                raise JobError(f"the process that {self._does} did not start (exit code {process.returncode})")
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
