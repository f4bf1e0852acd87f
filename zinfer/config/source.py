"""Where a configuration comes from: a dict, a JSON file or keyword arguments. Files are strict JSON: a key twice in
one object, NaN and Infinity are refused. Which keys mean something is not known here."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zinfer.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """Keys as they were given. `label` names the source in messages; `file` is the file they stand in, if any."""

    label: str
    keys: Mapping[str, object]
    file: Path | None = None
    is_kwargs: bool = False

    def error(self, message: str) -> ConfigError:
        """The message, with the file's name before it."""
        return ConfigError(f"{self.file}: {message}" if self.file else message)


class _Object(dict[str, object]):
    """A JSON object that remembers a key it was given twice: a parser's hook knows no path."""

    repeated: str | None = None


def config_source(config: str | os.PathLike[str] | Mapping[str, object] | None) -> Source:
    """The source of `init_inference`'s `config`: nothing, a mapping or the path of a JSON file.

    Raises ConfigError when a file cannot be read or is not one JSON object.
    """
    if config is None:
        return Source("config", {})
    if isinstance(config, Mapping):
        return Source("config", config)
    if isinstance(config, (str, os.PathLike)):
        file = Path(config)
        return Source(str(file), read_json(file, "config"), file)
    raise ConfigError(f"config: expected a dict or the path of a JSON file, got {type(config).__name__}")


def kwargs_source(kwargs: Mapping[str, object] | None) -> Source:
    """The source of `init_inference`'s keyword arguments."""
    return Source("keyword arguments", kwargs or {}, is_kwargs=True)


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
