"""Configurations in JSON files, which are strict: a key twice in one object, NaN and Infinity are refused."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from zinfer.errors import ConfigError


class _Object(dict[str, object]):
    """A JSON object that remembers a key it was given twice: a parser's hook knows no path."""

    repeated: str | None = None


def config_keys(config: str | os.PathLike[str] | Mapping[str, object] | None) -> Mapping[str, object]:
    """The keys of `init_inference`'s `config`: none, a mapping's or those in a JSON file.

    Raises:
        ConfigError: a file cannot be read or is not one JSON object, or it is neither a mapping nor a path.
    """
    if config is None or isinstance(config, Mapping):
        return config or {}
    if isinstance(config, (str, os.PathLike)):
        return read_json(Path(config), "config")
    raise ConfigError(f"config: expected a dict or the path of a JSON file, got {type(config).__name__}")


def read_json(file: Path, what: str) -> Mapping[str, object]:
    """The one object in a strict JSON file; `what` is the argument that names it.

    Raises:
        ConfigError: the file cannot be read or holds something else.
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
            yield f"{path}.{value.repeated}".lstrip("."), "stands twice in one object; remove one"
        for name, part in value.items():
            yield from _faults(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _faults(part, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, "NaN and Infinity are not JSON; write a finite number"
