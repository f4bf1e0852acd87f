"""Reads one source against the table of keys: aliases become the keys they stand for, values are parsed, unknown keys
and requests for what is unsupported are refused. What the keys mean together is not looked at here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from zinfer.config.key import Key, Status
from zinfer.config.keys import BY_NAME, BY_PATH, KEYS
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.config.values import NoEffect, NotAvailable, Unusable, flag, number_of, show
from zinfer.errors import ConfigError

_LIKE_HERE = 0.6
_LIKE_ELSEWHERE = 0.8
_MAX_PLACES = 3


@dataclass(frozen=True)
class Given:
    """A value that a source states.

    Attributes:
        written: the key's path as the user spelt it.
        raw: what was written.
        value: what it means.
        label: names what states it, in messages.
        reason: why it changes nothing, if it does not.
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
    """The error of two keys that cannot both be given; `why` ends with the remedy."""
    return ConfigError(f"{first} ({first.label}) contradicts {second} ({second.label}): {why}")


def read(keys: Mapping[str, object], label: str, *, in_file: bool = False, is_kwargs: bool = False) -> dict[str, Given]:
    """Everything that one source states, by the keys' own paths; also what is ignored.

    Args:
        label: names the source in messages; with ``in_file``, messages begin with it.
        is_kwargs: zinfer's own keys may stand alone.

    Raises:
        ConfigError: the first key or value that cannot be used.
    """
    reader = _Reader(label, is_kwargs)
    try:
        reader.read(keys, "", "")
    except _Fault as fault:
        raise ConfigError(f"{label}: {fault}" if in_file else f"{fault}") from None
    return reader.given


class _Fault(Exception):
    """What is wrong with a source, without its name."""


class _Reader:
    """Reads one source.

    Attributes:
        written: how each key and section was spelt; a second spelling of one is an error.
    """

    def __init__(self, label: str, is_kwargs: bool) -> None:
        self.label = label
        self.is_kwargs = is_kwargs
        self.given: dict[str, Given] = {}
        self.written: dict[str, str] = {}

    def read(self, keys: Mapping[str, object], path: str, written: str) -> None:
        """Read the keys of one section; `path` and `written` are its own name and the user's, empty at the top."""
        for name, value in keys.items():
            self._key(*self._known(name, path, written), value)

    def _key(self, key: Key, written: str, value: object) -> None:
        if key.status is Status.IGNORED:
            self.given[key.path] = Given(key, written, value, value, self.label, key.reason)
        elif key.status is Status.UNSUPPORTED:
            if number_of(value) not in key.idle and _asks(value, off_is_idle=not key.idle):
                instead = show(key.idle[0] if key.idle else None)
                raise self._refusal(written, value, NotAvailable(key.reason, instead))
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
        """The key that `name` means in a section, and the full path as the user spells it."""
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
    """What both state together, an old spelling under the key that it means.

    Raises:
        ConfigError: two values of one key.
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


def _asks(value: object, *, off_is_idle: bool = True) -> bool:
    """Whether the value of an unsupported key asks for anything; numbers may be off in any spelling."""
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
    return value is None or (isinstance(value, str) and value == "auto")


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _advice(name: str, section: str, section_as_written: str) -> str:
    """The end of the message on an unknown key `name`: the section that knows it, else the nearest known name."""
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
