"""Read one source by the table of keys: resolve aliases, parse values, and refuse unknown keys and unsupported
features. Combinations of keys are checked elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from zinfer.config.key import Key, Status
from zinfer.config.keys import BY_NAME, BY_PATH, KEYS
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.config.values import NoEffect, Unusable, flag, show
from zinfer.errors import ConfigError

_LIKE_HERE = 0.6
_LIKE_ELSEWHERE = 0.8
_MAX_PLACES = 3


@dataclass(frozen=True)
class Given:
    """A key and its value in a source.

    Attributes:
        written: the key's path as the user wrote it.
        raw: the value as written.
        value: the parsed value.
        label: name of the source in messages.
        reason: why it has no effect; empty if it has one.
    """

    key: Key
    written: str
    raw: object
    value: Any
    label: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.written} = {show(self.raw)}"


def contradiction(first: Given, second: Given, why: str) -> ConfigError:
    """Return the error for two keys that contradict each other; `why` ends with the remedy."""
    return ConfigError(f"{first} ({first.label}) contradicts {second} ({second.label}): {why}")


def read(keys: Mapping[str, object], label: str, *, in_file: bool = False, is_kwargs: bool = False) -> dict[str, Given]:
    """Read all keys of a source, including ignored ones, by the keys' own paths.

    Args:
        label: name of the source in messages; with ``in_file``, messages begin with it.
        is_kwargs: allow zinfer's own keys without their section.

    Raises:
        ConfigError: a key or value is invalid; names the first one.
    """
    reader = _Reader(label, is_kwargs)
    try:
        reader.read(keys, "", "")
    except _Fault as fault:
        raise ConfigError(f"{label}: {fault}" if in_file else f"{fault}") from None
    return reader.given


class _Fault(Exception):
    """An error in a source, without the source's name."""


class _Reader:
    """Reads one source.

    Attributes:
        written: each key and section as written; a second name for one is an error.
    """

    def __init__(self, label: str, is_kwargs: bool) -> None:
        self.label = label
        self.is_kwargs = is_kwargs
        self.given: dict[str, Given] = {}
        self.written: dict[str, str] = {}

    def read(self, keys: Mapping[str, object], path: str, written: str) -> None:
        """Read the keys of a section; `path` is its own path, `written` the user's, both empty at the top."""
        for name, value in keys.items():
            self._key(*self._known(name, path, written), value)

    def _key(self, key: Key, written: str, value: object) -> None:
        if key.status is Status.IGNORED:
            self.given[key.path] = Given(key, written, value, value, self.label, key.reason)
        elif _is_unstated(value):
            return
        elif key.parse is not None:
            self._value(key, written, value)
        elif isinstance(value, Mapping | QuantizationConfig):
            self.read(value if isinstance(value, Mapping) else asdict(value), key.path, written)
        elif not _is_off(value) and value not in key.idle:
            raise self._refusal(written, value, Unusable("an object {...}"))

    def _value(self, key: Key, written: str, raw: object) -> None:
        assert key.parse is not None
        try:
            value = key.parse(raw)
        except Unusable as fault:
            raise self._refusal(written, raw, fault) from None
        if value is not None:
            reason = value.reason if isinstance(value, NoEffect) else ""
            self.given[key.path] = Given(key, written, raw, value, self.label, reason)

    def _known(self, name: object, path: str, written: str) -> tuple[Key, str]:
        """Return the key for `name` in a section, and its full path as the user wrote it."""
        if not isinstance(name, str):
            raise _Fault(f"{_joined(written, show(name))}: keys must be text")
        spelt = _joined(written, name)
        key = BY_NAME[path].get(name)
        if key is None and self.is_kwargs and not path:
            key = BY_NAME["zinfer"].get(name)
        if key is None:
            raise _Fault(f"unknown key {spelt}; {_advice(name, path, written)}")
        if key.path in self.written:
            raise _Fault(f"{self.written[key.path]} and {spelt} are the same key; keep one of them")
        self.written[key.path] = spelt
        return key, spelt

    def _refusal(self, written: str, raw: object, fault: Unusable) -> _Fault:
        if fault.inside:
            written, raw = f"{written}.{fault.inside}", fault.value
        return _Fault(f"{written} = {show(raw)}{fault}")


def merge(config: Mapping[str, Given], kwargs: Mapping[str, Given]) -> dict[str, Given]:
    """Merge both sources; old names are replaced by the keys they mean.

    Raises:
        ConfigError: a key has two different values.
    """
    for path, ours in config.items():
        theirs = kwargs.get(path, ours)
        if ours.value != theirs.value and not _is_unstated(ours.raw) and not _is_unstated(theirs.raw):
            raise ConfigError(
                f"{path} is given twice with different values: {ours} ({ours.label}) "
                f"and {theirs} ({theirs.label}); keep one of them"
            )
    given = {**config, **kwargs}
    meant = {path: item for path, item in given.items() if item.key.same_as is None}
    for old in given.values():
        if meaning := old.key.same_as:
            present = meant.setdefault(meaning, replace(old, key=BY_PATH[meaning]))
            if present.value != old.value:
                raise contradiction(old, present, f"both mean {meaning}; keep one of them")
    return meant


def _is_off(value: object) -> bool:
    """Return whether a value is false, in any form that `flag` accepts."""
    try:
        return not flag(value)
    except Unusable:
        return False


def _is_unstated(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _advice(name: str, section: str, section_as_written: str) -> str:
    """Return the advice for an unknown key: the section it belongs in, else the most similar name."""
    by_status = sorted(KEYS, key=lambda key: list(Status).index(key.status))
    places = [key.path for key in by_status if _plain(name) in map(_plain, (key.name, *key.aliases))]
    if places:
        return "it belongs in " + " or ".join(places[:_MAX_PLACES])
    here = {_plain(known): _joined(section_as_written, known) for known in BY_NAME[section]}
    elsewhere = {_plain(key.name): key.path for key in reversed(by_status)}
    for candidates, likeness in ((here, _LIKE_HERE), (elsewhere, _LIKE_ELSEWHERE)):
        for nearest in get_close_matches(_plain(name), candidates, 1, likeness):
            return f"did you mean {candidates[nearest]}?"
    if section:
        return "known there: " + ", ".join(sorted(key.name for key in KEYS if key.parent == section))
    return "remove it; zinfer.config.keys.KEYS lists what is known"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
