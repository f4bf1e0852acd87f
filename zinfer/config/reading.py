"""Reads one source against the table of keys: aliases become the keys they stand for, values are parsed, unknown keys
and requests for what is not available yet are refused. What the keys mean together is not looked at here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from zinfer.config.key import Key, Status
from zinfer.config.keys import BY_NAME, BY_PATH, KEYS
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.config.source import Source
from zinfer.config.values import NoEffect, NotAvailable, Unusable, flag, number_of, show
from zinfer.errors import ConfigError

AUTO = "auto"
LIKE_HERE = 0.6
LIKE_ELSEWHERE = 0.8
MAX_PLACES = 3


@dataclass(frozen=True)
class Given:
    """A value that a source states: the key, the path as it was written, what was written and what it means.

    `reason` says why the value has no effect, where it has none.
    """

    key: Key
    written: str
    raw: object
    value: Any
    source: Source
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.written} = {show(self.raw)}"


@dataclass
class Reading:
    """What one source states, by the keys' own paths."""

    source: Source
    given: dict[str, Given] = field(default_factory=dict)
    ignored: dict[str, Given] = field(default_factory=dict)
    """Keys without effect: kept so that two sources cannot differ on them, and to be listed."""
    written: dict[str, str] = field(default_factory=dict)
    """How each key and section was spelt: a second spelling of one is an error."""

    def section(self, keys: Mapping[str, object], path: str, written: str) -> None:
        """Reads the keys of one section; `path` and `written` are its own name and the user's, empty at the top."""
        for name, value in keys.items():
            key, spelt = self._known(name, path, written)
            self._key(key, spelt, value)

    def _key(self, key: Key, written: str, value: object) -> None:
        if key.status is Status.NO_EFFECT:
            self._without_effect(key, written, value, key.reason)
        elif key.status is Status.NOT_YET:
            self._not_yet(key, written, value)
        elif _is_unstated(value):
            return
        elif not key.is_section:
            self._value(key, written, value)
        elif isinstance(value, Mapping):
            self.section(value, key.path, written)
        elif isinstance(value, QuantizationConfig):
            self.section(value.as_section(), key.path, written)
        elif not _is_off(value) and value not in key.idle:
            raise self._unusable(written, value, "an object {...}")

    def _value(self, key: Key, written: str, raw: object) -> None:
        assert key.parse is not None, key.path
        try:
            value = key.parse(raw)
        except Unusable as expected:
            if expected.inside:
                written, raw = f"{written}.{expected.inside}", expected.value
            raise self._unusable(written, raw, str(expected)) from None
        except NotAvailable as missing:
            raise self._not_available(written, raw, str(missing), missing.instead) from None
        if isinstance(value, NoEffect):
            self._without_effect(key, written, raw, value.reason)
        elif value is not None:
            self.given[key.path] = Given(key, written, raw, value, self.source)

    def _without_effect(self, key: Key, written: str, raw: object, reason: str) -> None:
        self.ignored[key.path] = Given(key, written, raw, raw, self.source, reason)

    def _not_yet(self, key: Key, written: str, value: object) -> None:
        if number_of(value) not in key.idle and _asks(value, off_is_idle=not key.idle):
            quiet = key.idle[0] if key.idle else None
            raise self._not_available(written, value, key.reason, show(quiet))

    def _known(self, name: object, path: str, written: str) -> tuple[Key, str]:
        """The key that `name` means in a section, and the full path as the user spells it."""
        if not isinstance(name, str):
            raise self.source.error(f"{_joined(written, show(name))}: keys must be text")
        spelt = _joined(written, name)
        key = BY_NAME[path].get(name)
        if key is None and self.source.is_kwargs and not path:
            key = BY_NAME["zinfer"].get(name)
        if key is None:
            raise self.source.error(f"unknown key {spelt}; {_advice(name, path, written)}")
        if key.path in self.written:
            raise self.source.error(f"{self.written[key.path]} and {spelt} are the same key; keep one of them")
        self.written[key.path] = spelt
        return key, spelt

    def _unusable(self, written: str, value: object, expected: str) -> ConfigError:
        return self.source.error(f"{written} = {show(value)}: expected {expected}")

    def _not_available(self, written: str, value: object, what: str, instead: str) -> ConfigError:
        return self.source.error(
            f"{written} = {show(value)} is not available yet: {what}; remove it or set it to {instead}"
        )


def read(source: Source) -> Reading:
    """Everything that the source states. Raises ConfigError for the first key or value that cannot be used."""
    reading = Reading(source)
    reading.section(source.keys, "", "")
    return reading


def merge(config: Reading, kwargs: Reading) -> Reading:
    """What both state together; a key that both give must mean the same in both."""
    given = _one_meaning(_united(config.given, kwargs.given))
    return Reading(config.source, given, _united(config.ignored, kwargs.ignored))


def _united(config: dict[str, Given], kwargs: dict[str, Given]) -> dict[str, Given]:
    for path, ours in config.items():
        theirs = kwargs.get(path, ours)
        if not _is_unstated(ours.raw) and not _is_unstated(theirs.raw) and ours.value != theirs.value:
            raise ConfigError(
                f"{path} is given twice with different values: {ours} ({ours.source.label}) "
                f"and {theirs} ({theirs.source.label}); keep one of them"
            )
    return {**config, **kwargs}


def _one_meaning(given: dict[str, Given]) -> dict[str, Given]:
    """The same, with every value under the key that it means: an old spelling moves to the present one."""
    meant = {path: value for path, value in given.items() if value.key.same_as is None}
    for old in given.values():
        path = old.key.same_as
        if path is None:
            continue
        present = meant.setdefault(path, replace(old, key=BY_PATH[path]))
        if present.value != old.value:
            raise ConfigError(
                f"{old} ({old.source.label}) contradicts {present} ({present.source.label}): "
                f"both mean {path}; keep one of them"
            )
    return meant


def _asks(value: object, *, off_is_idle: bool = True) -> bool:
    """Whether the value of a key that is not available yet asks for anything; numbers may be off in any spelling."""
    if _is_unstated(value) or value is False or (off_is_idle and _is_off(value)):
        return False
    if isinstance(value, Mapping):
        return not _is_off(value.get("enabled")) and any(map(_asks, value.values()))
    return not isinstance(value, (str, list, tuple, set)) or len(value) > 0


def _is_off(value: object) -> bool:
    """Whether a value is false, in any spelling that a switch takes."""
    try:
        return not flag(value)
    except Unusable:
        return False


def _is_unstated(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == AUTO)


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _advice(name: str, section: str, section_as_written: str) -> str:
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
