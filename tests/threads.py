"""Lists what this process holds open, and runs calls with a time limit or an interrupt."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

Result = TypeVar("Result")

rings_the_alarm = pytest.mark.timeout(method="thread")
"""For tests with `interrupted`: pytest-timeout's other method would set the same alarm."""


def open_descriptors() -> int:
    """Descriptors of this process that something still holds; what earlier tests left is collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def settled_threads() -> int:
    """Threads once those that are ending have ended."""
    for _ in range(50):
        found = threading.active_count()
        time.sleep(0.01)
        if threading.active_count() == found:
            break
    return threading.active_count()


def within(timeout_s: float, run: Callable[[], Result]) -> Result | None:
    """What ``run`` gives on another thread, or None when it fails or does not end in time."""
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def interrupted(run: Callable[[], object], after_s: float) -> bool:
    """Whether Ctrl-C, after so long, struck ``run``. Its test must be marked `rings_the_alarm`."""

    def ring(signum: int, frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return False
