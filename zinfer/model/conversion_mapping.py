"""Places for checkpoint tensors whose names are not the module's: transformers' own rules, as far as they only place.

transformers renames tensors, stacks experts and joins matrices while it loads (`conversion_mapping.py`). Renaming,
stacking and joining along the first dimension leave every byte as it is, so that blocks go on being read in place. What
changes bytes (a transposition, a permutation, a split) is refused by name. Quantized matrices are placed likewise, each
by the name that it would have in full.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from zinfer.checkpoint import JoinedTensor, TensorEntry
from zinfer.quantization.stored import JoinedMatrix, StoredMatrix

# The chains of operations that place tensors one behind the other, as (operation, dimension). Stacked along 0 and then
# joined along 1, the tensors of one expert are neighbours.
_STACKED: Final = (("MergeModulelist", 0),)
_STACKED_AND_JOINED: Final = (("MergeModulelist", 0), ("Concatenate", 1))
_JOINED: Final = (("Concatenate", 0),)


class CheckpointMapping:
    """What transformers would make of the tensors of one model's checkpoint.

    Attributes:
        found: a weight for each of the module's names that could be made.
        refused: why the others could not, by the checkpoint's name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        entries: Mapping[str, TensorEntry | StoredMatrix],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Sort the tensors.

        Args:
            entries: those that have no place under their own names.
            shapes: of all that the module has, by its names.
        """
        self.found: dict[str, TensorEntry | JoinedTensor | StoredMatrix] = {}
        self.refused: dict[str, str] = {}
        rules = get_model_conversion_mapping(model) if entries else []
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        gathered: dict[str, dict[str, list[TensorEntry | StoredMatrix]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(entries, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(shapes))
            if target not in shapes:
                continue
            if pattern is None:
                self.found[target] = entries[name]
            else:
                gathered[target][pattern].append(entries[name])
        for target, by_source in gathered.items():
            self._join(target, shapes[target], by_source, by_pattern[next(iter(by_source))])

    def _join(
        self,
        target: str,
        shape: tuple[int, ...],
        by_source: Mapping[str, list[TensorEntry | StoredMatrix]],
        rule: WeightConverter,
    ) -> None:
        chain = tuple((type(each).__name__, getattr(each, "dim", None)) for each in rule.operations)
        lists = [by_source.get(pattern, []) for pattern in rule.source_patterns]
        pieces = [piece for own in lists for piece in own]
        if chain not in (_STACKED, _JOINED, _STACKED_AND_JOINED):
            reason = f"{target} is made of it by {_told(chain)}, which moves bytes around; that is not available yet"
            self.refused |= {piece.name: reason for piece in pieces}
            return
        if chain == _STACKED_AND_JOINED and len({len(own) for own in lists}) == 1:
            pieces = [piece for expert in zip(*lists, strict=True) for piece in expert]
        alike = chain == _JOINED or all(len({piece.shape for piece in own}) == 1 for own in lists if own)
        joined = _joined(target, shape, pieces) if alike else None
        if joined is not None:
            self.found[target] = joined
            return
        reason = f"with the {len(pieces) - 1} others of {target} it does not make up {list(shape)}: "
        self.refused |= {piece.name: reason + _reason(pieces) for piece in pieces}


def _joined(
    target: str, shape: tuple[int, ...], pieces: Sequence[TensorEntry | StoredMatrix]
) -> JoinedTensor | JoinedMatrix | None:
    matrices = [piece for piece in pieces if isinstance(piece, StoredMatrix)]
    if len(matrices) == len(pieces):
        return JoinedMatrix.join(target, shape, matrices)
    tensors = [piece for piece in pieces if isinstance(piece, TensorEntry)]
    return JoinedTensor.of(target, shape, tensors) if len(tensors) == len(pieces) else None


def _reason(pieces: Sequence[TensorEntry | StoredMatrix]) -> str:
    """Why they were not joined, and what to do."""
    formats = {piece.format if isinstance(piece, StoredMatrix) else None for piece in pieces}
    remedy = "take the checkpoint in full precision and quantize it with `zinfer quantize`"
    if len(formats) > 1:
        return f"they are not all quantized alike; {remedy}"
    if any(format is not None and format.orders_columns for format in formats):
        return f"experts whose columns are in activation order (desc_act, actorder) are not read; {remedy}"
    return "some are missing, or config.json describes another model"


def _told(chain: tuple[tuple[str, Any], ...]) -> str:
    return ", ".join(f"{name}(dim={dim})" if dim is not None else name for name, dim in chain)
