"""Convert pydantic's errors to messages of this project."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError

_MAX_SHOWN: Final = 60
_MAX_NAME: Final = 100
_MAX_LISTED: Final = 20
_LEAST_LIKENESS: Final = 0.85
"""Of a misspelling, such as `temperture`; `add_special_tokens` is like `skip_special_tokens` by 0.81, and means another
thing."""
_ELSEWHERE: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_new_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
    "stop_sequences": "stop",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
}
"""Names that other interfaces have for a field."""
_GUIDED: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's names before `structured_outputs`."""

MESSAGES: Final = "a list of messages, objects with a 'role' and a 'content'"
TOKEN_IDS: Final = "a list of token ids, whole numbers of at least 0"
_A_WHOLE: Final = "a whole number"
MUST_BE: Final[Mapping[str, str]] = {
    "string_type": "a text",
    "string_unicode": "a text without half of a surrogate pair",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text that {pattern} matches",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _A_WHOLE),
    "int_parsing_size": "a whole number of fewer digits",
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    **dict.fromkeys(("list_type", "tuple_type", "frozen_set_type"), "a list"),
    "too_short": "a list or an object with at least {min_length} entries",
    "too_long": "a list or an object with at most {max_length} entries",
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type", "dataclass_exact_type"), "an object"),
    "is_instance_of": "an object",
    "none_required": "null, or left out",
    "literal_error": "{expected}",
}
"""What a value must be, in words of JSON, by pydantic's type of the error: its own messages are for programmers."""


def field_error(error: ValidationError, model: Any) -> str:
    """Return the first error as one sentence that names the field, what it must be and what was given.

    Args:
        model: the pydantic model or dataclass; a field's ``description`` says what the field must be.
    """
    problem: Mapping[str, Any] = {**error.errors(include_url=False)[0]}
    fields = {each.alias or name: each for name, each in model.__pydantic_fields__.items()}
    kind, place, message, given = problem["type"], problem["loc"], str(problem["msg"]), problem["input"]
    path = cut(".".join(map(str, place)))
    if kind == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{path}: {reason}" if path else reason
    if kind == "missing":
        return f"{path} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_field(path, list(fields)) if len(place) == 1 else f"unknown field {name_of(path)}"
    if not place or place[0] not in fields:  # for example invalid JSON
        return message
    if (allowed := fields[place[0]].description) is not None:
        return f"{place[0]} must be {allowed}, not {short(given)}{_inside(place[1:])}"
    return f"{path} must be {must_be(problem)}, not {short(given)}"


def must_be(problem: Mapping[str, Any]) -> str:
    """Return what a value must be, by pydantic's details of the error."""
    form = MUST_BE.get(problem["type"])
    if form is None:
        return str(problem["msg"]).removeprefix("Input should be ")
    return form.format(**problem.get("ctx", {}))


def unknown_field(name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown field, with the name that it must be a misspelling of, else all known ones."""
    return misspelling(name, known) or f"unknown field {name_of(name)}; known fields: {', '.join(dict.fromkeys(known))}"


def misspelling(name: str, known: Sequence[str]) -> str | None:
    """Return the message for an unknown field that must stand for a known one; None: it is like none of them."""
    known = list(dict.fromkeys(known))
    if name in _GUIDED and "structured_outputs" in known:
        return f"unknown field {name_of(name)}; give structured_outputs an object with {_GUIDED[name]!r} instead"
    near = difflib.get_close_matches(name[:_MAX_NAME], known, n=1, cutoff=_LEAST_LIKENESS)
    if _ELSEWHERE.get(name) in known:
        near = [_ELSEWHERE[name]]
    return f"unknown field {name_of(name)}; did you mean {near[0]!r}?" if near else None


def short(value: object) -> str:
    """Format a value for a message, cut if long; the rest of a long value is not looked at."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _MAX_SHOWN:
            return f"{text[: _MAX_SHOWN - 3]}..."
    return text


def cut(name: str) -> str:
    """Return a name that a client gave, cut if long, in printable characters."""
    return printable(_cut(name))


def printable(text: str) -> str:
    """Return a text in which line ends, control characters and the like are escaped: it cannot forge lines of a log."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def name_of(name: str) -> str:
    """Format a name that a client gave for a message, cut if long."""
    return repr(_cut(name))


def listed(names: Sequence[str]) -> str:
    """Format names that a client gave for a message; the first of many."""
    more = [f"and {len(names) - _MAX_LISTED:,} more"] if len(names) > _MAX_LISTED else []
    return ", ".join([*map(cut, names[:_MAX_LISTED]), *more])


def _cut(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."


def _pieces(value: object) -> Iterator[str]:
    """Yield the parts of a value's `repr`: of a text only its beginning, and no more items than can be shown."""
    if isinstance(value, str):
        yield repr(value[: _MAX_SHOWN + 1])
    elif isinstance(value, dict | list):
        begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
        yield begin
        for number, each in enumerate(islice(value, _MAX_SHOWN)):
            yield ", " if number else ""
            yield from _pieces(each)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[each])
        yield end
    else:
        yield repr(value)


def _inside(place: Sequence[int | str]) -> str:
    """Describe the position of a value in a list or an object."""
    places = [str(part) for part in place if isinstance(part, int)]
    return " as a key" if "[key]" in place else f" at {'.'.join(places)}" if places else ""
