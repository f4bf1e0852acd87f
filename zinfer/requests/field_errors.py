"""Convert pydantic's errors to messages of this project."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

_MOST_SHOWN: Final = 60
_LEAST_LIKENESS: Final = 0.85
"""Of a misspelling, such as `temperture`; `add_special_tokens` is like `skip_special_tokens` by 0.81, and means another
thing."""
_ELSEWHERE: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
}
"""Names that other interfaces have for a field."""
_GUIDED: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's names before `structured_outputs`."""


def field_error(error: ValidationError, model: Any) -> str:
    """Return the first error as one sentence that names the field, what it must be and what was given.

    Args:
        model: the pydantic model or dataclass; a field's ``description`` says what the field must be.
    """
    problem, fields = error.errors(include_url=False)[0], model.__pydantic_fields__
    kind, place, message, given = problem["type"], problem["loc"], problem["msg"], problem["input"]
    path = ".".join(map(str, place))
    if kind == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{path}: {reason}" if path else reason
    if kind == "missing":
        return f"{path} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_field(path, list(fields)) if len(place) == 1 else f"unknown field {path!r}"
    if not place or place[0] not in fields:  # for example invalid JSON
        return message
    if (allowed := fields[place[0]].description) is not None:
        return f"{place[0]} must be {allowed}, not {short(given)}{_inside(place[1:])}"
    return f"{path} must be {message.removeprefix('Input should be ')}, not {short(given)}"


def unknown_field(name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown field, with the name that it must be a misspelling of, else all known ones."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_LIKENESS)
    if _ELSEWHERE.get(name) in known:
        near = [_ELSEWHERE[name]]
    hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}"
    if name in _GUIDED and "structured_outputs" in known:
        hint = f"give structured_outputs an object with {_GUIDED[name]!r} instead"
    return f"unknown field {name!r}; {hint}"


def short(value: object) -> str:
    """Format a value for a message, truncated if long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _inside(place: Sequence[int | str]) -> str:
    """Describe the position of a value in a list or an object."""
    places = [str(part) for part in place if isinstance(part, int)]
    return " as a key" if "[key]" in place else f" at {'.'.join(places)}" if places else ""
