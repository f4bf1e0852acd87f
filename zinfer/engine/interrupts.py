"""Delays Ctrl-C within an engine's calls to points where the engine's state is consistent.

Python handles signals in the main thread, between any two bytecodes. While `deferred` runs work there, a signal is
only noted; its handler runs when the work calls `deliver_pending`, or at its end. Other threads get no signals.

A handler with a method ``announce(number)`` has it called at once when its signal is noted: a user who waits for the
end of a pass, perhaps for minutes, knows that the signal has come. It must not raise.
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
"""The handlers that `_note` replaces; empty while nothing is deferred."""
_noted: list[int] = []


def deferred(work: Callable[[], _T]) -> _T:
    """Run work; in the main thread, Python signal handlers run only in `deliver_pending` and at the end.

    A second signal is handled at once, so that a user can force an exit: the work's state may then be inconsistent.
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
            if signal.getsignal(number) is _note:  # a handler may have installed another
                signal.signal(number, handler)
        noted = list(_noted)
        _former.clear()
        _noted.clear()
        for number in noted:
            former[number](number, None)


def deliver_pending() -> None:
    """Run the handler of a noted signal; call it where the state is consistent."""
    if _noted and threading.current_thread() is threading.main_thread():
        number = _noted.pop()
        _former[number](number, None)


def _note(number: int, frame: FrameType | None) -> None:
    if number in _noted:
        _noted.remove(number)
        _former[number](number, frame)
    else:
        _noted.append(number)
        if (announce := getattr(_former[number], "announce", None)) is not None:
            announce(number)
