"""A server's processes do not look for garbage among what they have loaded."""

import gc
import weakref

from zinfer.serve.engine_process import freeze_loaded


class Node:
    """Refers to itself, so that only a search frees it."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_loaded_stays_and_garbage_goes() -> None:
    lost, kept = weakref.ref(Node()), Node()
    try:
        freeze_loaded()
        assert lost() is None
        assert not any(each is kept for each in gc.get_objects())
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None, "what comes later is looked for"
    finally:
        gc.unfreeze()
