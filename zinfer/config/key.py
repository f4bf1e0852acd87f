"""The type of a row in the table of configuration keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from zinfer.config.values import Parser


class Status(Enum):
    """How a key in a configuration is treated."""

    SUPPORTED = "supported"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Key:
    """A key of the configuration, named by its full path.

    Attributes:
        reason: what a supported key does, or why an ignored one has no effect.
        aliases: other names of the key in its section.
        parse: parses the value of a supported key; None for sections.
        default: value if the key is not given.
        field: dotted path of the field in `Settings` for the parsed value, if any.
        same_as: path of the key that this one is another name of.
        idle: values that request nothing from a section, besides null, false and empty ones.
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
        """The path of the key's section; empty at the top."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the key's path."""
        return self.path.rpartition(".")[2]


def setting(path: str, parse: Parser, reason: str, *aliases: str, default: object = None) -> Any:
    """Define a settings field together with its key."""
    return field(default=default, metadata={"key": Key(path, Status.SUPPORTED, reason, aliases, parse, default)})


def supported(
    path: str, parse: Parser, reason: str, *aliases: str, default: object = None, same_as: str | None = None
) -> Key:
    """Define a supported key that is not itself a settings field."""
    return Key(path, Status.SUPPORTED, reason, aliases, parse, default, same_as=same_as)


def section(path: str, reason: str, *aliases: str, idle: tuple[object, ...] = ()) -> Key:
    """Define a section whose keys are read."""
    return Key(path, Status.SUPPORTED, reason, aliases, idle=idle)


def ignored(parent: str, reason: str, *names: str) -> Iterable[Key]:
    """Define keys that are ignored for one reason; "name|alias" adds aliases."""
    for name, *aliases in (text.split("|") for text in names):
        yield Key(f"{parent}.{name}" if parent else name, Status.IGNORED, reason, tuple(aliases))
