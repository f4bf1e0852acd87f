"""Render chat templates within limits of time and memory."""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zinfer.errors import ConfigError, JobError

_SCRIPT: Final = Path(__file__).with_name("template_process.py")
_MOST_CPU_S: Final = 10
_QUIET: Final = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


class ChatTemplates:
    """Renders chats in a subprocess, which starts with the first chat and restarts if a chat ended it.

    Args:
        most_cpu_s: limit of CPU seconds per chat; long ones take milliseconds.
    """

    def __init__(self, most_cpu_s: int = _MOST_CPU_S) -> None:
        self._most_cpu_s = most_cpu_s
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., ChatTemplates] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render a chat with its generation prompt.

        Raises:
            ConfigError: the template refuses the messages, fails, or takes too long; or they are not JSON.
            JobError: the process does not start.
        """
        # Drop null values like transformers' apply_chat_template: templates handle missing keys, but not null.
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            line = json.dumps({"template": template, "messages": given, "variables": dict(variables)})
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"messages: a chat template takes only JSON values: {error}") from error
        with self._lock:
            answer = self._ask(line)
        for outcome, what in (("refused", "refuses them"), ("failed", "fails on them")):
            if outcome in answer:
                raise ConfigError(f"messages: the chat template {what}: {answer[outcome]}")
        return answer["text"]

    def close(self) -> None:
        """End the process for good, even while it renders a chat for another thread."""
        self._is_closed = True
        self._stop()

    def _ask(self, line: str) -> dict[str, str]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
        except BrokenPipeError:
            said = ""
        except BaseException:  # Ctrl-C: the next chat must not read the answer to this one
            self._stop()
            raise
        if said.endswith("\n"):
            answer: dict[str, str] = json.loads(said)
            return answer
        self._stop()
        if process.returncode == -signal.SIGXCPU:
            return {"failed": f"it computes for more than {self._most_cpu_s} s"}
        return {"failed": f"it ended the process that renders it (exit code {process.returncode})"}

    def _running(self) -> "subprocess.Popen[str]":
        if self._is_closed:
            raise RuntimeError("cannot render chats after close()")
        if self._process is None:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(self._most_cpu_s)],
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
                raise JobError(
                    f"the process that renders chat templates did not start (exit code {process.returncode})"
                )
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
