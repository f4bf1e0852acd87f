"""Errors of requests in the names that their client has for the fields.

A message about one field begins with its name. So errors can be told in the client's names although many of them come
as text, from the process that computes.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel, ValidationError

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import cut, field_error

_QUOTED: Final = r"""(?<!\w)(?:'[^']*'|"[^"]*")"""
"""A value of the client's, in which nothing is renamed."""
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


def invalid_body(error: ValidationError, kind: type[BaseModel]) -> FieldError:
    """Return the first error of a body."""
    message, place = field_error(error, kind), error.errors(include_url=False)[0]["loc"]
    return FieldError(message, str(place[0])) if place else ClientNames(frozenset(kind.model_fields)).error(message)
