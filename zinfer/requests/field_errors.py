"""Sentences on fields that cannot be used: pydantic's errors in the words of this project."""

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

_MOST_SHOWN = 60


def field_error(error: ValidationError, model: Any) -> str:
    """Return the first error as one sentence that names the field, what it must be and what was given.

    Args:
        model: the pydantic model or dataclass; a field's ``description`` says what the field must be.
    """
    problem = error.errors(include_url=False)[0]
    place, message, given = problem["loc"], problem["msg"], problem["input"]
    fields = model.__pydantic_fields__
    field = str(place[0]) if place else ""
    if problem["type"] == "missing":
        return f"{'.'.join(map(str, place))} is missing"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_field(field, list(fields))
    if problem["type"] == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{field}: {reason}" if field else reason
    allowed = fields[field].description
    if allowed is None:
        return f"{'.'.join(map(str, place))} must be {message.removeprefix('Input should be ')}, not {short(given)}"
    return f"{field} must be {allowed}, not {short(given)}{_inside(place[1:])}"


def unknown_field(name: str, known: Sequence[str]) -> str:
    """Return the message on an unknown field: the name that it resembles, else all fields that are known."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}"
    return f"unknown field {name!r}; {hint}"


def short(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _inside(place: Sequence[int | str]) -> str:
    """Where in a list or an object the value is."""
    places = [str(part) for part in place if isinstance(part, int)]
    return " as a key" if "[key]" in place else f" at {'.'.join(places)}" if places else ""
