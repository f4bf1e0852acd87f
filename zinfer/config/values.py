"""Parsers of single values. Each converts a user's value to the value in the settings, or raises `Unusable`. The reader
adds the key's path to errors."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plan of a published model needs no torch
    import torch
    from torch import nn

Parser = Callable[[object], object]

UNIT_BYTES = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b)?", re.IGNORECASE)
SIZE_EXPECTED = 'a positive number of bytes, or one with a unit such as "24GB", "1.5GB" or "512MiB"'

_BLOCKS_EXPECTED = 'an object like {Block: ("attn.out_proj", "mlp.fc2")}: classes of modules, and linear layers in them'
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", re.IGNORECASE)
_SIZE_LIKE = re.compile(r"([+-]?[0-9]+(?:[.,][0-9]+)?)\s*([a-z]+)\.?", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s)", re.IGNORECASE)
_MOST_CHARS = 40  # of a number written as text
_MOST_S = 10**9

_DTYPES = {
    **dict.fromkeys(("fp16", "half", "float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float", "float32"), "float32"),
    "int8": "int8",
}


class Unusable(ValueError):
    """Raised for an invalid value. The message continues ``path = value`` with what is expected.

    Attributes:
        inside: path of the invalid part within the value; empty: the whole value.
        value: the invalid part.
    """

    def __init__(self, expected: str, inside: str = "", value: object = None) -> None:
        super().__init__(f": expected {expected}")
        self.inside = inside
        self.value = value


class NotAvailable(Unusable):
    """Raised for a value that requests a missing feature; `instead` is an accepted value."""

    def __init__(self, what: str, instead: str) -> None:
        ValueError.__init__(self, f" is not available yet: {what}; remove it or set it to {instead}")
        self.inside = ""


class Refused(Unusable):
    """Raised for a value that cannot be honoured; the message continues ``path = value`` with why, and what to do."""

    def __init__(self, why: str) -> None:
        ValueError.__init__(self, f": {why}")
        self.inside = ""


@dataclass(frozen=True)
class NoEffect:
    """Returned by a parser for a valid value without effect."""

    reason: str


@dataclass(frozen=True)
class BlockClass:
    """A class of modules, or its name, and suffixes of names of linear layers in it.

    DeepSpeed sums the outputs of those layers over GPUs. On one GPU they only show whether the policy was written for
    the model.
    """

    kind: type[nn.Module] | str
    linears: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind.__name__

    def is_class_of(self, module: nn.Module) -> bool:
        """Return whether the module is a block of this class."""
        if isinstance(self.kind, str):
            return type(module).__name__ == self.kind
        return isinstance(module, self.kind)


def flag(value: object) -> bool:
    """Parse true or false, also as 1 or 0 or as text, like DeepSpeed."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    number = int(value) if isinstance(value, bool) else _finite(value)
    if number not in (0, 1):
        raise Unusable("true or false")
    return number == 1


def count(minimum: int, maximum: int | None = None) -> Parser:
    """Return a parser of whole numbers; accepts 3.0 and "3", but not 3.5."""
    expected = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: object) -> int:
        number = _finite(value)
        if (
            number is None
            or number.denominator > 1
            or not minimum <= number <= (number if maximum is None else maximum)
        ):
            raise Unusable(f"a whole number {expected}")
        return int(number)

    return parse


def count_or_off(value: object) -> int | None:
    """Parse a whole number; None for 0, which states nothing."""
    number = count(0)(value)
    assert isinstance(number, int)
    return number or None


def multiple(unit: int) -> Parser:
    """Return a parser of positive multiples of `unit`."""

    def parse(value: object) -> int:
        number = _finite(value)
        if number is None or number < unit or number % unit:
            raise Unusable(f"a multiple of {unit}")
        return int(number)

    return parse


def elements(value: object) -> int:
    """Parse a number of elements, also as text such as "1e9"; rounds fractions down, as in `0.9 * hidden**2`."""
    number = _finite(value)
    if number is None or number < 0:
        raise Unusable("a number of elements, 0 or more")
    return math.floor(number)


def size_bytes(value: object) -> int:
    """Parse bytes: a number, or text with a decimal (GB) or binary (GiB) unit; rounds fractions down.

    Refuses a bare letter ("24G"), which is ambiguous.
    """
    if isinstance(value, str) and (match := SIZE.fullmatch(value.strip())):
        unit = match[2] or "B"
        if unit[0] in "KMGT" and unit[-1] == "b":
            raise Unusable(f"{SIZE_EXPECTED}; {unit} are bits, eight to a byte: write {unit[:-1]}B for bytes")
        number: Fraction | None = Fraction(math.floor(Fraction(match[1]) * UNIT_BYTES[unit.lower()]))
    else:
        number = None if isinstance(value, str) else _finite(value)
    if number is None or number.denominator > 1 or number < 1:
        raise Unusable(SIZE_EXPECTED + _nearest_size(value))
    return int(number)


def _nearest_size(value: object) -> str:
    """Return a hint on what was probably meant by an unusable size; empty: unknown."""
    match = _SIZE_LIKE.fullmatch(value.strip()) if isinstance(value, str) else None
    number, unit = (match[1].replace(",", "."), match[2].lower()) if match else (str(value), "b")
    if _NUMBER.fullmatch(number) and Fraction(number) <= 0:
        return "; leave it out for the default"
    if match is None or unit[0] not in "bkmgt":
        return ""
    prefix = "" if unit[0] == "b" else unit[0].upper()
    decimal, binary = f"{prefix.replace('K', 'k')}B", f"{prefix}iB"
    names = [decimal, binary] if len(unit) == 1 and prefix else [binary if prefix and "ib" in unit else decimal]
    return f"; did you mean {' or '.join(show(number + name) for name in names)}?"


def seconds(value: object) -> float:
    """Parse a time: a number of seconds, or text with a unit such as "200ms" or "1.5s"."""
    number = _finite(value)
    if isinstance(value, str) and (match := _TIME.fullmatch(value.strip())):
        number = Fraction(match[1]) / (1000 if match[2].lower() == "ms" else 1)
    if number is None or not 0 < number <= _MOST_S:
        raise Unusable('a time above 0 in seconds, or with a unit such as "200ms" or "1.5s"')
    return float(number)


def path(value: object) -> Path:
    """Parse a path; expands ~."""
    if isinstance(value, (str, os.PathLike)) and (text := os.fspath(value)) and isinstance(text, str):
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise Unusable("a path; `~name` must name an existing user") from error
    raise Unusable("a path, as text")


def text(value: object) -> str:
    """Parse a word, in lower case."""
    if isinstance(value, str) and value:
        return value.lower()
    raise Unusable("a name, as text")


def texts(value: object) -> tuple[str, ...]:
    """Parse a word, or a list of them, without repetitions."""
    several = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(each, str) and each for each in several):
        raise Unusable("a name, or a list of names")
    return tuple(dict.fromkeys(several))


def above_one(value: object) -> int | None:
    """Parse a whole number; None for 0 and 1, which state nothing."""
    number = count_or_off(value)
    return None if number == 1 else number


def folder_or_empty(value: object) -> Path | None:
    """Parse a path; None for the empty one, DeepSpeed's default for some keys."""
    return None if value == "" else path(value)


def choice(*names: str) -> Parser:
    """Return a parser of one of the given words."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        raise Unusable("one of " + ", ".join(show(name) for name in names))

    return parse


def dtype(value: object) -> torch.dtype:
    """Parse a floating-point torch dtype or its name; also int8, which requests quantized weights."""
    import torch

    name = str(value).lower().removeprefix("torch.") if isinstance(value, (str, torch.dtype)) else ""
    if name not in _DTYPES:
        raise Unusable('a torch dtype, "fp16", "bf16", "fp32" or "int8"')
    found = getattr(torch, _DTYPES[name])
    assert isinstance(found, torch.dtype)
    return found


def block_classes(value: object) -> tuple[BlockClass, ...] | None:
    """Parse the classes of an injection policy; None if there are none."""
    if not isinstance(value, Mapping):
        raise Unusable(_BLOCKS_EXPECTED)
    found = []
    for kind, linears in value.items():
        is_class = isinstance(kind, type) and _is_module_class(kind)
        names = (linears,) if isinstance(linears, str) else linears
        if not (is_class or isinstance(kind, str)) or not isinstance(names, list | tuple):
            raise Unusable(_BLOCKS_EXPECTED)
        if not all(isinstance(name, str) and name for name in names):
            raise Unusable(_BLOCKS_EXPECTED)
        found.append(BlockClass(kind, tuple(names)))
    return tuple(found) or None


def _is_module_class(kind: type) -> bool:
    from torch import nn

    return issubclass(kind, nn.Module)


def mixture(value: object) -> str:
    """Parse the kind of a mixture of experts."""
    if value == "residual":
        raise NotAvailable(
            "residual mixtures add experts to a dense MLP, and no class of transformers has such layers",
            '"standard"',
        )
    if value != "standard":
        raise Unusable('"standard"')
    return value


def num_experts(value: object) -> int | NoEffect:
    """Parse the number of experts of a model's mixtures, also in a list; 1, DeepSpeed's default, states nothing."""
    several = value if isinstance(value, list | tuple) else [value]
    numbers = set(map(count(1), several))
    if len(numbers) != 1:
        raise Unusable("one number, because all mixtures of a model have as many experts")
    number = numbers.pop()
    if number == 1:
        return NoEffect("1 is DeepSpeed's default; the model's own config says how many experts it has")
    assert isinstance(number, int)
    return number


def cpu_if_true(value: object) -> str | None:
    """Parse the old name of `offload_param.device`: true is "cpu", false states nothing."""
    return "cpu" if flag(value) else None


def show(value: object) -> str:
    """Format a value as JSON if possible, else by its repr, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def number_of(value: object) -> object:
    """Convert a text such as "3" or "1e9" to a number; return other values unchanged."""
    if not isinstance(value, str) or len(value) > _MOST_CHARS or not _NUMBER.fullmatch(value):
        return value
    return int(value) if value.lstrip("+-").isdecimal() else float(value)


def _finite(value: object) -> Fraction | None:
    value = number_of(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return Fraction(int(value))
    return Fraction(float(value)) if math.isfinite(value) else None
