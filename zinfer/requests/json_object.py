"""Reads JSON objects that others wrote, strictly: standard JSON, no field twice, limited depth."""

import json
import re
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import short

SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MOST_DEPTH: Final = 64


def read_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Args:
        what: name of the data in messages.

    Raises:
        ConfigError: it is not UTF-8, not JSON, not an object, has a field twice or is nested too deep.
    """
    try:
        record = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        is_deep = data.count(b"[") + data.count(b"{") > _MOST_DEPTH and _depth(record) > _MOST_DEPTH
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start} of {what}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON that can be used: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"not a JSON object but {short(record)}")
    if is_deep:
        raise ConfigError(f"nested more than {_MOST_DEPTH} deep")
    return record


def check_unicode(record: object) -> None:
    """Raise ConfigError if a text of a JSON value holds half of a surrogate pair."""
    if SURROGATE.search(json.dumps(record, ensure_ascii=False)):
        raise ConfigError("the text holds half of a surrogate pair, which is not Unicode text")


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
            raise ValueError(f"the field '{name}' is given twice")
        record[name] = value
    return record
