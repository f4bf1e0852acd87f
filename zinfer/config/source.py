"""Read configurations from strict JSON files: repeated keys, NaN and Infinity are refused."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from zinfer.errors import ConfigError


class _Object(dict[str, object]):
    """A JSON object that records a repeated key, since a parser hook does not know the path."""

    repeated: str | None = None


def config_keys(config: str | os.PathLike[str] | Mapping[str, object] | None) -> Mapping[str, object]:
    """Return the keys of `config`: those of a mapping or of a JSON file, or none.

    Raises:
        ConfigError: `config` is neither a mapping nor a path, or the file is unreadable or not one JSON object.
    """
    if config is None or isinstance(config, Mapping):
        return config or {}
    if isinstance(config, (str, os.PathLike)):
        return read_json(Path(config), "config")
    raise ConfigError(f"config: expected a dict or the path of a JSON file, got {type(config).__name__}")


def read_json(file: Path, what: str) -> Mapping[str, object]:
    """Return the object in a strict JSON file; `what` is the name of the argument, for messages.

    Raises:
        ConfigError: the file cannot be read, or does not hold one object.
    """
    try:
        document = json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=_pairs)
    except OSError as error:
        remedy = f"{what} must be a dict or the path of a JSON file"
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(document, _Object):
        raise ConfigError(f"{file}: expected one JSON object {{...}} at the top, got {type(document).__name__}")
    for path, fault in _faults(document, ""):
        raise ConfigError(f"{file}: {path}: {fault}")
    return document


def _pairs(pairs: list[tuple[str, object]]) -> _Object:
    document = _Object(pairs)
    if len(document) < len(pairs):
        [(document.repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
    return document


def _faults(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Object):
        if value.repeated is not None:
            yield f"{path}.{value.repeated}".lstrip("."), "occurs twice in one object; remove one"
        for name, part in value.items():
            yield from _faults(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _faults(part, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, "NaN and Infinity are not JSON; write a finite number"
