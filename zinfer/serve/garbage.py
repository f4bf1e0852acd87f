"""Spares a process that serves the search for garbage among what it has loaded."""

import gc


def freeze_loaded() -> None:
    """Free what is garbage now, and never look again at the objects that are left.

    Commands do so after their imports (`zinfer.cli.ending.importing`); a model on a GPU imports compilers later. To
    look through all modules takes a third of a second, in which nothing is answered or launched.
    """
    gc.collect()
    gc.freeze()
