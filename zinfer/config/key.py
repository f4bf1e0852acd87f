"""One row of the table of keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from zinfer.config.values import Parser


class Status(Enum):
    """What becomes of a key that is given."""

    HONOURED = "honoured"
    NOT_YET = "not yet"
    NO_EFFECT = "without effect"


@dataclass(frozen=True)
class Key:
    """A key of the configuration, named by its full path.

    `reason` says what an honoured key does, which feature a key that is not available yet would need, or why a key
    changes nothing. `field` is the place in `Settings` that takes the parsed value, dotted. `same_as` is the path of
    the key of which this one is another way to say the same. `idle` are the values, beside null, false and empty
    ones, with which a key that is not available yet, or a section, asks for nothing.
    """

    path: str
    status: Status
    reason: str
    default: object = None
    aliases: tuple[str, ...] = ()
    parse: Parser | None = None
    is_section: bool = False
    field: str | None = None
    same_as: str | None = None
    idle: tuple[object, ...] = ()

    @property
    def parent(self) -> str:
        """The path of the section that holds the key; empty at the top."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key's own name, the last part of its path."""
        return self.path.rpartition(".")[2]


def section(path: str, reason: str, *aliases: str, idle: tuple[object, ...] = ()) -> Key:
    """A section that is looked into."""
    return Key(path, Status.HONOURED, reason, aliases=aliases, is_section=True, idle=idle)


def supported(
    path: str,
    parse: Parser,
    reason: str,
    *aliases: str,
    field: str | None = None,
    default: object = None,
    same_as: str | None = None,
) -> Key:
    """A key whose value is parsed and used."""
    return Key(path, Status.HONOURED, reason, default, aliases, parse, field=field, same_as=same_as)


def unsupported(path: str, what: str, *aliases: str, idle: tuple[object, ...] = ()) -> Key:
    """A key that may ask for nothing only."""
    default = idle[0] if idle else None
    return Key(path, Status.NOT_YET, what, default, aliases, idle=idle)


def ignored(parent: str, reason: str, *names: str) -> Iterable[Key]:
    """One row a name: keys that are accepted for one reason; "name|alias" gives aliases."""
    for name, *aliases in (text.split("|") for text in names):
        yield Key(f"{parent}.{name}" if parent else name, Status.NO_EFFECT, reason, aliases=tuple(aliases))


def parts(parent: str, what: str, *names: str) -> Iterable[Key]:
    """The keys of a section that is not available yet; known, so that misspelt ones are told."""
    for name in names:
        yield unsupported(f"{parent}.{name}", what)
