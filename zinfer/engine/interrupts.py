"""Ctrl-C in an engine's calls: it strikes where nothing is half done.

Python handles signals in the main thread, between any two of its lines. While `deferred` runs work there, a signal is
only noted, and its handler runs where the work calls `strike`, or at its end. Other threads are struck by nothing.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

_T = TypeVar("_T")
_Handler = Callable[[int, FrameType | None], object]

_SIGNALS: Final[tuple[int, ...]] = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_former: dict[int, _Handler] = {}
"""The handlers whose place `_note` has taken; none while nothing is deferred."""
_noted: list[int] = []


def deferred(work: Callable[[], _T]) -> _T:
    """Run work; in the main thread, signals that have handlers in Python strike at `strike` and at its end alone.

    A second one strikes at once, for who is tired of waiting: the work may then be left in disorder.
    """
    if _former or threading.current_thread() is not threading.main_thread():
        return work()
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                _former[number] = handler
                signal.signal(number, _note)
        return work()
    finally:
        former = dict(_former)
        for number, handler in former.items():
            if signal.getsignal(number) is _note:  # the handler itself may have chosen another
                signal.signal(number, handler)
        noted = list(_noted)
        _former.clear()
        _noted.clear()
        for number in noted:
            former[number](number, None)


def strike() -> None:
    """Let a noted signal strike: nothing is half done here."""
    if _noted and threading.current_thread() is threading.main_thread():
        number = _noted.pop()
        _former[number](number, None)


def _note(number: int, frame: FrameType | None) -> None:
    if number in _noted:
        _noted.remove(number)
        _former[number](number, frame)
    else:
        _noted.append(number)
