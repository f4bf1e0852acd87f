"""Published models by name: their shape, size and format, to plan for them without a folder.

They are in known_models.json, in the order of `--model list`. Imports little: a misspelt name is refused at once.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from zinfer import __version__
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat
from zinfer.weights.folder import HUB_NAME, find_folder, hub_name

_VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "fp8": {},
        "awq": {"bits": 4, "group_size": 128},
        "gptq-int4": {"bits": 4, "group_size": 128},
        "gptq-int8": {"bits": 8},
    }
)
"""`zinfer.quantization` by the end of a hub name, for models that are published in other formats too."""
_TRAINED: Final = re.compile(r"-(instruct|chat|base|hf|it|thinking|bf16|fp16|\d{4})$")
"""Ends of names that say how a model was trained, or when; its shape is the same."""
_AS_PUBLISHED: Final = ("bf16", "fp16", "fp8", "mxfp4", "awq", "gptq-int4", "gptq-int8", "int4 in groups of 32")
"""Formats that run as they are published."""
_E4M3: Final = QuantFormat(8, 128, is_float=True, group_rows=128, scale_dtype="float32", in_grid=True)
_E2M1: Final = QuantFormat(4, 32, is_float=True, scale_dtype="float8_e8m0fnu", in_grid=True)
_STORED: Final[Mapping[str, Quantization]] = MappingProxyType(
    {
        "fp8": Quantization((QuantRule(stored=_E4M3),)),
        "mxfp4": Quantization((QuantRule(stored=_E2M1),), include=("experts",)),
    }
)
"""The formats of weights that lie in slabs as they are published."""


@dataclass(frozen=True)
class KnownModel:
    """A published model.

    Attributes:
        name: that plans show.
        hub: its name on the Hugging Face hub.
        parameters: in 10^9.
        format: of the published weights.
        config: its config.json, without the fields that a plan does not read; None: the layers are not known.
        also: other names of this shape.
        active: parameters that a token is multiplied with, in 10^9; None: all.
        gigabytes: published; None: not known.
        quantization: `zinfer.quantization` with which its weights take as many bytes as those that are published take
            in a run; None: none, or `stored` has their formats.
        stand_in: in words, what the layers of ``config`` have in place of the model's; None: they are the model's.
    """

    name: str
    hub: str
    parameters: float
    format: str
    config: Mapping[str, Any] | None = None
    also: tuple[str, ...] = ()
    active: float | None = None
    gigabytes: float | None = None
    quantization: Mapping[str, Any] | None = None
    stand_in: str | None = None

    @property
    def stored(self) -> Quantization | None:
        """The formats in which its weights lie in slabs as they are published; None: others, or full precision."""
        return _STORED.get(self.format)

    @property
    def published(self) -> str:
        """Format and size, such as ``fp8, 689 GB``."""
        return self.format + (f", {self.gigabytes:,.4g} GB" if self.gigabytes else "")

    @property
    def size(self) -> str:
        """Parameters, such as ``671 B, 37 B active``."""
        return f"{self.parameters:,.4g} B" + (f", {self.active:.3g} B active" if self.active else "")

    def note(self, *, is_stated: bool = False) -> str | None:
        """Return a line on what zinfer does not run of it as published; None if it runs it all.

        Args:
            is_stated: the configuration says in which form the weights are planned.
        """
        planned = []
        if self.format not in _AS_PUBLISHED:
            if self.quantization is None:
                planned.append("safetensors")
            elif not is_stated:
                planned.append(_words(self.quantization))
        if self.stand_in is not None:
            planned.append(self.stand_in)
        if not planned:
            return None
        return (
            f"zinfer {__version__} does not run {self.hub} as published yet ({self.published}); planned as if it had "
            f"{' and '.join(planned)}"
        )


def _read() -> Mapping[str, KnownModel]:
    entries = json.loads((files("zinfer.model") / "known_models.json").read_text(encoding="utf-8"))
    models = [KnownModel(**{**entry, "also": tuple(entry.get("also", ()))}) for entry in entries]
    return MappingProxyType({model.name: model for model in models})


KNOWN_MODELS: Final = _read()
"""Published models by name."""


def find_known_model(model: str | os.PathLike[str]) -> KnownModel | None:
    """Return the published model of a name, with or without its organisation, in capitals or not.

    None: it is no such name, or a folder or a model of the Hugging Face cache has it, which comes first.
    """
    try:
        name = hub_name(model)
    except CheckpointError:
        return None
    if not HUB_NAME.fullmatch(name) or (found := _spelt(name.rpartition("/")[2].lower())) is None:
        return None
    try:
        find_folder(name)
    except CheckpointError:
        return found
    return None


def _spelt(name: str) -> KnownModel | None:
    by_name = {each: model for model in KNOWN_MODELS.values() for each in (model.name, *model.also, _last(model.hub))}
    if (found := by_name.get(name)) is not None:
        return found
    for end, quantization in _VARIANTS.items():
        if name.endswith(f"-{end}") and (found := _spelt(name.removesuffix(f"-{end}"))) is not None:
            hub = f"{found.hub.rpartition('/')[0]}/{_last(found.hub)}-{end}"
            return _variant(found, end, hub, quantization) if found.format != end else found
    if name.startswith("meta-"):
        return _spelt(name.removeprefix("meta-"))
    shorter = _TRAINED.sub("", name)
    return _spelt(shorter) if shorter != name else None


def _variant(model: KnownModel, end: str, hub: str, quantization: Mapping[str, Any]) -> KnownModel:
    """Return the model as it is published in another format, whose size is not recorded."""
    return KnownModel(
        name=f"{model.name}-{end}",
        hub=hub,
        parameters=model.parameters,
        format=end,
        config=model.config,
        active=model.active,
        quantization=quantization or None,
        stand_in=model.stand_in,
    )


def _last(hub: str) -> str:
    return hub.rpartition("/")[2].lower()


def near_names(model: str | os.PathLike[str]) -> list[str]:
    """Return the names of published models that are spelt like this one, the nearest first."""
    return get_close_matches(os.fspath(model).rpartition("/")[2].lower(), KNOWN_MODELS, 2, 0.75)


def known_config(model: KnownModel) -> Mapping[str, Any]:
    """Return the model's config.json.

    Raises:
        CheckpointError: its layers are not known.
    """
    if model.config is None:
        raise CheckpointError(
            f"{model.hub} ({model.size}; {model.published}): zinfer {__version__} does not run it yet, and knows too "
            "little of its layers to plan for them; `--model list` names those that it knows"
        )
    return model.config


def known_listing() -> str:
    """Return a line for each published model: name, parameters, format and size, and whether it runs as published."""
    width, lines = max(map(len, KNOWN_MODELS)), []
    for each in KNOWN_MODELS.values():
        fate = "cannot be planned yet" if each.config is None else "is planned, does not run yet" if each.note() else ""
        lines.append(f"{each.name:{width}}  {each.size:21}  {each.published}{fate and f': {fate}'}")
    return "\n".join(lines)


def _words(quantization: Mapping[str, Any]) -> str:
    kind = "FP8" if quantization.get("format") == "fp8" else f"INT{quantization['bits']}"
    groups = f" in groups of {quantization['group_size']}" if "group_size" in quantization else ""
    return f"{kind} weights{groups}"
