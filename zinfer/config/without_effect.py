"""Reports the keys of a configuration that change nothing here: in the log, or through a job's own messages."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from zinfer.config.settings import Settings

log = logging.getLogger(__name__)

_is_said: ContextVar[bool] = ContextVar("zinfer_without_effect_is_said", default=False)


def say_without_effect(settings: Settings, say: Callable[[str], object] = log.warning) -> None:
    """One line for each such key, with the reason; none inside of `said_before`.

    Args:
        settings: as they were resolved.
        say: takes a line; by default a warning in the log.
    """
    if not _is_said.get():
        for ignored in settings.without_effect:
            say(f"without effect: {ignored.path} ({ignored.reason})")


@contextmanager
def said_before() -> Iterator[None]:
    """Inside, engines do not report keys: their caller already has."""
    token = _is_said.set(True)
    try:
        yield
    finally:
        _is_said.reset(token)
