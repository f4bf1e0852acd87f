"""A benchmark's last word: one line of JSON with the machine's card, printed and kept."""

import json
from collections.abc import Mapping
from pathlib import Path

from card import machine_card


def publish(figures: Mapping[str, object], out: Path | None, versions: Mapping[str, str] | None = None) -> None:
    """Print the figures, and write them to ``out`` if it is given.

    Args:
        versions: of what ran beside zinfer, for the card.
    """
    line = json.dumps({**figures, "card": machine_card() | dict(versions or {})})
    _write(line, out)
    if out is not None:
        _partial(out).unlink(missing_ok=True)
    print(line)


def keep(figures: Mapping[str, object], out: Path | None) -> None:
    """Write what there is so far beside ``out``: a run that is cut off has not been for nothing."""
    if out is not None:
        _write(json.dumps({**figures, "unfinished": True, "card": machine_card()}), _partial(out))


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _write(line: str, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n")
