"""Prints and saves a benchmark's result: one line of JSON with the machine's card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from card import machine_card

MOST_SHARE: Final = 1.05
"""Of a ceiling: more says that the figure or the ceiling is wrong."""


def check_shares(figures: Mapping[str, object], where: str = "") -> None:
    """Refuse shares of a link or a disk above their ceiling; kernels' ``of_copy`` may, where caches help them."""
    for name, figure in figures.items():
        if isinstance(figure, Mapping):
            check_shares(figure, f"{where}{name}: ")
        elif isinstance(figure, int | float) and (name in ("share", "of_disk") or "_share" in name):
            assert figure <= MOST_SHARE, f"{where}{name} is {figure}, above its ceiling"


def publish(figures: Mapping[str, object], out: Path | None, versions: Mapping[str, str] | None = None) -> None:
    """Print the figures, and write them to ``out`` if it is given.

    Args:
        versions: of what ran beside zinfer, for the card.
    """
    check_shares(figures)
    line = json.dumps({**figures, "card": machine_card() | dict(versions or {})})
    _write(line, out)
    if out is not None:
        _partial(out).unlink(missing_ok=True)
    print(line)


def keep(figures: Mapping[str, object], out: Path | None) -> None:
    """Write what there is so far beside ``out``: a run that is cut off has not been for nothing."""
    check_shares(figures)
    if out is not None:
        _write(json.dumps({**figures, "unfinished": True, "card": machine_card()}), _partial(out))


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _write(line: str, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n")
