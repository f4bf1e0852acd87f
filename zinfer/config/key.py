"""One row of the table of keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from zinfer.config.values import Parser


class Status(Enum):
    """What becomes of a key that is given."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Key:
    """A key of the configuration, named by its full path.

    Attributes:
        reason: what a supported key does, which feature an unsupported one would need, why an ignored one changes
            nothing.
        aliases: other names of the key in its section.
        parse: reads the value of a supported key; None for sections.
        default: what the key means where it is not given.
        field: dotted place in `Settings` that takes the parsed value, if one does.
        same_as: path of the key of which this one is another spelling.
        idle: values, beside null, false and empty ones, with which an unsupported key, or a section, asks for nothing.
    """

    path: str
    status: Status
    reason: str
    aliases: tuple[str, ...] = ()
    parse: Parser | None = None
    default: object = None
    field: str | None = None
    same_as: str | None = None
    idle: tuple[object, ...] = ()

    @property
    def is_section(self) -> bool:
        return self.status is Status.SUPPORTED and self.parse is None

    @property
    def parent(self) -> str:
        """The path of the section that holds the key; empty at the top."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key's own name, the last part of its path."""
        return self.path.rpartition(".")[2]


def setting(path: str, parse: Parser, reason: str, *aliases: str, default: object = None) -> Any:
    """A field of the settings together with the key that states it."""
    return field(default=default, metadata={"key": Key(path, Status.SUPPORTED, reason, aliases, parse, default)})


def supported(path: str, parse: Parser, reason: str, *, default: object = None, same_as: str | None = None) -> Key:
    """A key whose value is used, but is no field of the settings."""
    return Key(path, Status.SUPPORTED, reason, (), parse, default, same_as=same_as)


def section(path: str, reason: str, *aliases: str, idle: tuple[object, ...] = ()) -> Key:
    """A section that is looked into."""
    return Key(path, Status.SUPPORTED, reason, aliases, idle=idle)


def unsupported(path: str, what: str, *aliases: str, idle: tuple[object, ...] = ()) -> Key:
    """A key that may ask for nothing only."""
    return Key(path, Status.UNSUPPORTED, what, aliases, idle=idle)


def ignored(parent: str, reason: str, *names: str) -> Iterable[Key]:
    """One row a name: keys that are accepted for one reason; "name|alias" gives aliases."""
    for name, *aliases in (text.split("|") for text in names):
        yield Key(f"{parent}.{name}" if parent else name, Status.IGNORED, reason, tuple(aliases))
