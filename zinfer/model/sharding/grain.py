"""What stays together when layers are divided, because it shares scales or words of codes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zinfer.config.quantization_rules import Quantization
from zinfer.model.matching import Weight
from zinfer.weights.quantized import StoredMatrix, Units


@dataclass(frozen=True)
class Grain:
    """Units of cuts.

    Attributes:
        preferred: rows of a feed-forward that stay together if they can, because they will share scales.
        units: of weights that the checkpoint holds quantized, by their names in the model.
    """

    preferred: int = 1
    units: Mapping[str, Units] = field(default_factory=dict)

    @classmethod
    def of(cls, rules: Quantization | None, weights: Mapping[str, Weight]) -> "Grain":
        """Return the units for weights in a checkpoint, and for rules of quantization."""
        preferred = max((rule.group_size or 1 for rule in rules.rules), default=1) if rules is not None else 1
        return cls(preferred, {name: each.units for name, each in weights.items() if isinstance(each, StoredMatrix)})
