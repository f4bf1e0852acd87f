"""Reads objects of config.json: values by type, and errors that name the key. The texts come from strangers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zinfer.checkpoint.faults import MAX_NAME
from zinfer.errors import CheckpointError

REMEDY: Final = "use the full-precision checkpoint and quantize it while loading"


@dataclass(frozen=True)
class Section:
    """The object at ``path`` of config.json, "" for the whole. A member that is null counts as absent."""

    path: str
    members: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.unusable(key, "not a whole number; restore config.json")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.unusable(key, "neither true nor false; restore config.json")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """In lower case: the tools that write these are not of one mind."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.unusable(key, "not a text; restore config.json")
        return value.lower()

    def section(self, key: str) -> "Section | None":
        value = self.members.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.unusable(key, "not an object; restore config.json")
        return Section(self._path_of(key), value)

    def unusable(self, key: str, reason: str) -> CheckpointError:
        """The error to raise for a member's value; the reason ends with what to do."""
        shown = repr(self.members[key]) if key in self.members else "missing"
        shown = shown if len(shown) <= MAX_NAME else f"{shown[:MAX_NAME]}..."
        return CheckpointError(f"config.json: {self._path_of(key)} is {shown}: {reason}")

    def unsupported(self, key: str, reason: str) -> CheckpointError:
        """As `unusable`, for what is well said but not read here."""
        return self.unusable(key, f"{reason}; {REMEDY}")

    def _path_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _value(self, key: str, default: Any) -> Any:
        value = self.members.get(key)
        return default if value is None else value
