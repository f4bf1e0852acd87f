"""Parses the JSON of a checkpoint (headers, indexes and configs), which is untrusted input.

Refuses ambiguous input that Python's `json` accepts: duplicate keys, NaN and Infinity, lone surrogates, and sizes that
are not 64-bit naturals. Nesting too deep to parse is an error too.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from zinfer.checkpoint.faults import shorten
from zinfer.errors import CheckpointError

MAX_NATURAL = 2**64 - 1
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class JsonFault(ValueError):
    """An error in a JSON text; `position` is its byte offset, if known."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason)
        self.position = position


def parse_object(data: bytes, *, lenient: bool = False) -> dict[str, Any]:
    """Return the JSON object in `data`, UTF-8 text.

    Only the integers 0 .. 2**64 - 1 become `int`; every other number is a `float`, as in the reference's serde_json,
    so that `-0` or an overflow cannot pass for a size. `lenient` accepts all that Python's parser does, as transformers
    does for configs.

    Raises:
        JsonFault: not UTF-8, not JSON, nested too deeply, not an object; unless lenient, also a key twice in one
            object, NaN, Infinity, or half a surrogate pair.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonFault("not valid UTF-8", error.start) from error
    options: dict[str, Any] = {}
    if not lenient:
        options = {"object_pairs_hook": _unique_object, "parse_int": _natural, "parse_constant": _refuse_constant}
    try:
        value = json.loads(text, **options)
    except json.JSONDecodeError as error:
        raise JsonFault(f"not valid JSON: {error.msg}", len(text[: error.pos].encode("utf-8"))) from error
    except RecursionError as error:
        raise JsonFault("nested too deeply") from error
    except JsonFault:
        raise
    except ValueError as error:  # an integer longer than Python's limit on digits
        raise JsonFault(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise JsonFault(f"{type(value).__name__} instead of an object {{...}}", 0)
    return value


def parse_file(path: Path, data: bytes, remedy: str, *, lenient: bool = False) -> dict[str, Any]:
    """As `parse_object`, for a file's bytes; raises CheckpointError with the file, the byte and the remedy."""
    try:
        return parse_object(data, lenient=lenient)
    except JsonFault as fault:
        where = "" if fault.position is None else f" at byte {fault.position}"
        raise CheckpointError(f"{path}:{where} {fault}: {remedy}") from fault


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        if _HALF_PAIR.search(text):
            raise JsonFault(f"the text {shorten(text)} holds half a surrogate pair")
    members = dict(pairs)
    if len(members) != len(pairs):
        [(name, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise JsonFault(f"the name {shorten(name)} occurs twice in one object")
    return members


def _natural(digits: str) -> int | float:
    if len(digits) > 20 or digits.startswith("-"):
        return float(digits)
    number = int(digits)
    return number if number <= MAX_NATURAL else float(digits)


def _refuse_constant(text: str) -> NoReturn:
    raise JsonFault(f"not valid JSON: {text}")
