"""Reads JSON objects that others wrote, strictly: standard JSON, no field twice, limited depth."""

import json
import re
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import name_of, short

SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAX_DEPTH: Final = 64
_MAX_LISTS: Final = 1 << 19
"""Lists and objects of one record. Python's parser keeps all other threads waiting while it makes them."""
_MAX_ITEMS: Final = 1 << 22
"""Commas of one record outside its texts; likewise."""
_TEXT: Final = re.compile(rb'"(?:[^"\\]+|\\.)*+"', re.DOTALL)
_LONG_NUMBER: Final = re.compile(rb"\d{101}")
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def read_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Args:
        what: name of the data in messages.

    Raises:
        ConfigError: it is not UTF-8, not JSON, not an object, has a field twice, is nested too deep, or has too many
            items or a number of more than 100 digits.
    """
    _check_items(data, what)
    try:
        record = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        is_deep = _count(data, b"[{") > _MAX_DEPTH and _depth(record) > _MAX_DEPTH
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start} of {what}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON that can be used: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"not a JSON object but {short(record)}")
    if is_deep:
        raise ConfigError(f"nested more than {_MAX_DEPTH} deep")
    return record


def read_text_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``, whose texts are Unicode. Raises ConfigError as `read_object`, and if not."""
    record = read_object(data, what)
    if _SURROGATE_ESCAPE.search(data):  # UTF-8 has none
        check_unicode(record)
    return record


def check_unicode(record: object) -> None:
    """Raise ConfigError if a text of a JSON value holds half of a surrogate pair."""
    if SURROGATE.search(json.dumps(record, ensure_ascii=False)):
        raise ConfigError("the text holds half of a surrogate pair, which is not Unicode text")


def _check_items(data: bytes, what: str) -> None:
    if _LONG_NUMBER.search(data) and (found := _LONG_NUMBER.search(_TEXT.sub(b"", data))):
        raise ConfigError(
            f"not JSON that can be used: {what} has a number of more than 100 digits, which begins with "
            f"{found[0][:20].decode()}"
        )
    for marks, most, items in ((b"[{", _MAX_LISTS, "lists and objects"), (b",", _MAX_ITEMS, "items")):
        if _count(data, marks) > most and (num := _count(_TEXT.sub(b"", data), marks)) > most:
            raise ConfigError(f"{what} has {num:,} {items}; {most:,} at most are supported")


def _count(data: bytes, marks: bytes) -> int:
    return sum(data.count(mark) for mark in marks)


def _depth(value: object) -> int:
    """Return the nesting depth of lists and objects. Python's own recursion limit depends on the caller's stack."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(each) for each in inner if isinstance(each, list | dict)), default=0)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"the field {name_of(name)} is given twice")
        record[name] = value
    return record
