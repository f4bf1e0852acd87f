"""How layers are divided where a configuration states it, in the form of DeepSpeed's `partition_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from zinfer.config.values import Refused, Unusable, flag

Kind: TypeAlias = Literal["column", "row", "skip"]

_MEMBERS: Final = ("layer_specs", "use_default_specs")
# Of embedding and head, divided by vocabulary here; of what is unmatched, always an error; the size is tp_size.
_IDLE_MEMBERS: Final = ("strict_mode", "tp_size", "embedding_partition_dim", "lm_head_patterns")
_SPEC_MEMBERS: Final = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output")
_EXPECTED: Final = (
    'an object like {"layer_specs": [{"patterns": [".*\\\\.o_proj\\\\.weight$"], "partition_type": "row"}]}'
)


@dataclass(frozen=True)
class LayerSpec:
    """How weights with certain names are divided.

    Attributes:
        patterns: of names of parameters, matched from their beginning on.
        kind: "column": by outputs; "row": by inputs, and outputs are summed over ranks; "skip": not at all.
        parts: sizes of matrices that lie one below the other and are divided one by one; zeros for equal ones.
        gathers: outputs are joined over ranks.
        model_types: families that it is for; empty: all.
    """

    patterns: tuple[str, ...]
    kind: Kind
    parts: tuple[int, ...] = ()
    gathers: bool = False
    model_types: tuple[str, ...] = ()

    def matches(self, name: str, model_type: str) -> bool:
        """Return whether it is for a parameter of a model."""
        is_meant = not self.model_types or model_type in self.model_types
        names = (name, name.removesuffix(".weight"))
        return is_meant and any(re.match(pattern, each) for pattern in self.patterns for each in names)


@dataclass(frozen=True)
class PartitionSpecs:
    """A `partition_config`: the first spec that matches counts; ``uses_preset``: else the preset's, if one is named."""

    specs: tuple[LayerSpec, ...]
    uses_preset: bool = True


def partition_specs(value: object) -> PartitionSpecs | None:
    """Parse `tensor_parallel.partition_config`; None if it states nothing."""
    members = _object(value, "", (*_MEMBERS, *_IDLE_MEMBERS), _EXPECTED)
    specs = members.get("layer_specs") or []
    if not isinstance(specs, list | tuple):
        raise _unusable("a list of objects", "layer_specs", specs)
    found = tuple(_spec(spec, f"layer_specs[{number}]") for number, spec in enumerate(specs))
    return PartitionSpecs(found, flag(members.get("use_default_specs", True))) if found else None


def _spec(value: object, path: str) -> LayerSpec:
    members = _object(value, path, _SPEC_MEMBERS, _EXPECTED)
    patterns, written = _texts(members.get("patterns"), f"{path}.patterns"), members.get("partition_type", "column")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _unusable(f"a regular expression ({error})", f"{path}.patterns", pattern) from None
    kind: Kind | None = next((each for each in get_args(Kind) if each == str(written).lower()), None)
    if kind is None:
        raise _unusable('"column", "row" or "skip"', f"{path}.partition_type", written)
    families = _texts(members.get("model_types") or [], f"{path}.model_types")
    parts = _parts(members, kind, path)
    gathers = flag(members.get("gather_output") or False)
    return LayerSpec(patterns, kind, parts, gathers, tuple(each.lower() for each in families))


def _parts(members: Mapping[str, Any], kind: str, path: str) -> tuple[int, ...]:
    """Return the sizes in ``shape``, zeros for equal ones."""
    shape, dim = members.get("shape"), members.get("partition_dim")
    usual = 1 if kind == "row" else 0
    if dim not in (None, usual):
        raise _refused(f"{path}.partition_dim", dim, f"a {kind} spec divides dimension {usual} of [outputs, inputs]")
    if shape is None:
        return ()
    if kind != "column" or not isinstance(shape, list | tuple) or len(shape) != 2 or shape[1] != -1:
        raise _refused(f"{path}.shape", shape, "only outputs in parts are divided, as [3, -1] or [[q, k, v], -1]")
    sizes = shape[0] if isinstance(shape[0], list | tuple) else [0] * shape[0] if isinstance(shape[0], int) else []
    if len(sizes) not in (2, 3) or not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise _refused(f"{path}.shape", shape, "outputs lie in two parts (gate and up) or three (q, k and v)")
    return tuple(sizes)


def _object(value: object, path: str, known: tuple[str, ...], expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unusable(expected, path, value)
    for name in value:
        if name not in known:
            raise _unusable(f"one of {', '.join(known)}", f"{path}.{name}".lstrip("."), value[name])
    return value


def _texts(value: object, path: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _unusable("a list of texts", path, value)
    return tuple(value)


def _unusable(expected: str, path: str, value: object) -> Unusable:
    return Unusable(expected, path, value)


def _refused(path: str, value: object, why: str) -> Refused:
    fault = Refused(f"{why}; leave it out, or leave out the section: the family's own plan then divides the layers")
    fault.inside, fault.value = path, value
    return fault
