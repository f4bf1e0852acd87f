"""Errors of requests in the names that their client has for the fields.

A message about one field begins with its name. So errors can be told in the client's names although many of them come
as text, from the process that computes.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import cut, field_error, misspelling

_QUOTED: Final = r"""(?<!\w)(?:'[^']*'|"[^"]*")"""
"""A value of the client's, in which nothing is renamed."""
_MAX_UNKNOWN: Final = 64
_MAX_NOTED: Final = 1000
_noted: Final[set[str]] = set()
log = logging.getLogger("zinfer.requests")
_ABOUT_PROMPT: Final = re.compile(r"(?:(?:the|a) prompts?|the tokenizer|token ids)\b")


class FieldError(ConfigError):
    """A request cannot be used.

    Attributes:
        field: the one that is wrong, by the client's name; None: there is not a single one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = None if field is None else cut(field)


@dataclass(frozen=True)
class ClientNames:
    """The fields of a kind of requests, as clients name them.

    Attributes:
        fields: all of them.
        prompt: the one that holds the prompt.
        by_own: clients' names by those here, where they differ.
    """

    fields: frozenset[str]
    prompt: str = "prompt"
    by_own: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn errors of configurations into `FieldError`s with these names; those that are, stay."""
        try:
            yield
        except FieldError:
            raise
        except ConfigError as error:
            raise self.error(str(error)) from error

    def error(self, message: str) -> FieldError:
        """Return the error with a message, in these names."""
        own = "|".join(map(re.escape, self.by_own))
        if own:
            message = re.sub(
                rf"{_QUOTED}|\b({own})\b", lambda found: self.by_own[found[1]] if found[1] else found[0], message
            )
        return FieldError(message, self._field_of(message))

    def _field_of(self, message: str) -> str | None:
        first = re.match(r"\w+(?! and \w+ )\b", message)
        if first is not None and first[0] in self.fields:
            return first[0]
        return self.prompt if _ABOUT_PROMPT.match(message) else None


def without_unknown(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the known fields of a body. What is like none of them is left out, with a line in the log unless null.

    Raises:
        FieldError: one must be a misspelling of a known one, or there are too many.
    """
    unknown = [name for name, value in given.items() if name not in known and value is not None]
    if len(unknown) > _MAX_UNKNOWN:
        raise FieldError(f"the body has {len(unknown):,} unknown fields; {_MAX_UNKNOWN} at most are left out")
    for name in unknown:
        if (message := misspelling(name, list(known))) is not None:
            raise FieldError(message, name)
    for name in unknown:
        if (shown := cut(name)) not in _noted and len(_noted) < _MAX_NOTED:  # each once; clients choose the names
            _noted.add(shown)
            log.warning("requests: the field %s is unknown and has no effect", shown)
    return {name: value for name, value in given.items() if name in known}


class OpenBody(BaseModel):
    """A body whose unknown fields are left out, as `without_unknown`."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown(cls, given: object) -> object:
        return without_unknown(given, cls.model_fields) if isinstance(given, Mapping) else given


def invalid_body(error: ValidationError, kind: type[BaseModel]) -> FieldError:
    """Return the first error of a body."""
    first = error.errors(include_url=False)[0]
    if isinstance(own := first.get("ctx", {}).get("error"), FieldError):
        return own
    message, place = field_error(error, kind), first["loc"]
    return FieldError(message, str(place[0])) if place else ClientNames(frozenset(kind.model_fields)).error(message)
