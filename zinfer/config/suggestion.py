"""What to say to a key that nobody knows: where it belongs, or which known key it resembles."""

from __future__ import annotations

from difflib import SequenceMatcher

from zinfer.config.key import Key, Status
from zinfer.config.keys import BY_NAME, KEYS

LIKE_HERE = 0.6
LIKE_ELSEWHERE = 0.8
MAX_PLACES = 3


def advice(name: str, section: str, section_as_written: str) -> str:
    """Ends the message on the unknown key `name` of `section`; both spellings of the section are paths, empty at the
    top."""
    places = [key.path for key in sorted(KEYS, key=_rank) if _same(name, key)]
    if places:
        return "it belongs in " + " or ".join(places[:MAX_PLACES])
    likeness = {(section_as_written, known): _ratio(name, known) for known in BY_NAME.get(section, {})}
    likeness = {place: ratio for place, ratio in likeness.items() if ratio >= LIKE_HERE}
    if not likeness:
        likeness = {(key.parent, key.name): _ratio(name, key.name) for key in sorted(KEYS, key=_rank)}
        likeness = {place: ratio for place, ratio in likeness.items() if ratio >= LIKE_ELSEWHERE}
    if likeness:
        parent, nearest = max(likeness, key=lambda place: likeness[place])
        return f"did you mean {parent}.{nearest}?" if parent else f"did you mean {nearest}?"
    if section:
        return "known there: " + ", ".join(sorted(key.name for key in KEYS if key.parent == section))
    return "remove it; zinfer.config.keys.KEYS lists what is known"


def _same(name: str, key: Key) -> bool:
    return _plain(name) in (_plain(known) for known in (key.name, *key.aliases))


def _rank(key: Key) -> int:
    return [Status.HONOURED, Status.NOT_YET, Status.NO_EFFECT].index(key.status)


def _ratio(name: str, known: str) -> float:
    return SequenceMatcher(None, _plain(name), _plain(known)).ratio()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
