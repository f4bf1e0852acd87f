"""Writes what ranks send each other as bytes, and reads it as data alone.

[Note: data, not programs]
Whoever can put bytes where pickle reads them can run commands. Here a value is what msgpack has, and the few types
below: tensors, arrays, sets, and the dataclasses, named tuples, models and enumerations of zinfer, which are named by
module and class. Reading looks the classes up among the modules that this process has imported, and sets their fields
without calling them.
"""

import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from pydantic import BaseModel

_LEAST_PACKED: Final = 8
_INT64: Final = "q"
_PRODUCT: Final = "zinfer."
_PLAIN: Final = (type(None), bool, float, str, bytes)


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes, which `from_bytes` reads.

    Raises:
        TypeError: it holds something else than data ([Note: data, not programs]).
    """
    return msgspec.msgpack.encode(_packed(value))


def from_bytes(data: bytes) -> Any:
    """Return the value that was given to `to_bytes`.

    Raises:
        ValueError: these bytes are none that `to_bytes` wrote.
    """
    try:
        return _unpacked(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"what another rank sent cannot be read: {error}") from error


def _packed(value: Any) -> Any:
    """Return what msgpack has for a value: itself, or a list of the name of its kind and its parts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else ["int", str(value)]
    if kind in (list, tuple):
        if len(value) >= _LEAST_PACKED and {*map(type, value)} == {int}:
            try:
                return [kind.__name__ + "64", array(_INT64, value).tobytes()]
            except OverflowError:
                pass
        return [kind.__name__, [_packed(each) for each in value]]
    if kind in (set, frozenset):
        return [kind.__name__, [_packed(each) for each in value]]
    if kind is array:
        return ["array", value.typecode, value.tobytes()]
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        return ["tensor", str(host.dtype), list(host.shape), host.view(-1).view(torch.uint8).numpy().tobytes()]
    if isinstance(value, torch.dtype | torch.device):
        return [kind.__name__, str(value)]
    if isinstance(value, datetime):
        return ["datetime", value.isoformat()]
    if isinstance(value, Path):
        return ["path", str(value)]
    if kind.__module__.startswith(_PRODUCT):
        return _packed_object(value)
    if isinstance(value, Mapping):
        name = kind.__name__ if kind in (Counter, defaultdict) else "dict"
        return [name, [[_packed(key), _packed(each)] for key, each in value.items()]]
    raise TypeError(f"ranks send each other data, not {kind.__module__}.{kind.__qualname__}")


def _packed_object(value: Any) -> Any:
    kind = type(value)
    named = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, Enum):
        return ["enum", named, value.name]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["named", named, [_packed(each) for each in value]]
    if is_dataclass(kind):
        return ["object", named, [_packed(getattr(value, each.name)) for each in fields(kind)]]
    if isinstance(value, BaseModel):
        stated = [name for name in kind.model_fields if name in value.model_fields_set]
        return ["model", named, [_packed(getattr(value, name)) for name in kind.model_fields], stated]
    raise TypeError(f"ranks send each other data, not {named}")


def _unpacked(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, *parts = value
    return _READERS[name](*parts)


def _read_object(named: str, values: list[Any]) -> Any:
    kind = _class(named)
    if not is_dataclass(kind):
        raise TypeError(f"{named} is no dataclass")
    found = object.__new__(kind)
    for each, part in zip(fields(kind), values, strict=True):
        object.__setattr__(found, each.name, _unpacked(part))
    return found


def _read_named(named: str, values: list[Any]) -> Any:
    kind = _class(named)
    if not (issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(values)):
        raise TypeError(f"{named} is no named tuple of {len(values)}")
    return tuple.__new__(kind, map(_unpacked, values))


def _read_model(named: str, values: list[Any], stated: list[str]) -> Any:
    kind = _class(named)
    if not issubclass(kind, BaseModel):
        raise TypeError(f"{named} is no model of pydantic")
    parts = dict(zip(kind.model_fields, map(_unpacked, values), strict=True))
    return kind.model_construct({*stated}, **parts)


def _read_enum(named: str, name: str) -> Any:
    kind = _class(named)
    if not issubclass(kind, Enum):
        raise TypeError(f"{named} is no enumeration")
    return kind[name]


def _class(named: str) -> type:
    module, name = named.split(":")
    if not module.startswith(_PRODUCT):
        raise TypeError(f"{module} is no module of zinfer")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise TypeError(f"{named} is no class")
    return found


def _read_tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_read_dtype(dtype)).view(shape)


def _read_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _read_map(kind: Callable[..., Any], pairs: list[list[Any]]) -> Any:
    found = kind()
    for key, each in pairs:
        found[_unpacked(key)] = _unpacked(each)
    return found


def _read_array(typecode: str, data: bytes) -> "array[Any]":
    found = array(typecode)
    found.frombytes(data)
    return found


_READERS: Final[dict[str, Callable[..., Any]]] = {
    "int": int,
    "list": lambda parts: [_unpacked(each) for each in parts],
    "tuple": lambda parts: tuple(map(_unpacked, parts)),
    "set": lambda parts: {_unpacked(each) for each in parts},
    "frozenset": lambda parts: frozenset(map(_unpacked, parts)),
    "list64": lambda data: _read_array(_INT64, data).tolist(),
    "tuple64": lambda data: tuple(_read_array(_INT64, data)),
    "array": _read_array,
    "tensor": _read_tensor,
    "dtype": _read_dtype,
    "device": torch.device,
    "datetime": datetime.fromisoformat,
    "path": Path,
    "dict": lambda pairs: _read_map(dict, pairs),
    "Counter": lambda pairs: _read_map(Counter, pairs),
    "defaultdict": lambda pairs: _read_map(dict, pairs),
    "object": _read_object,
    "named": _read_named,
    "model": _read_model,
    "enum": _read_enum,
}
