"""Maps checkpoint tensors to a module's names by transformers' conversion rules, if they leave the bytes unchanged.

transformers renames tensors, stacks experts and joins matrices while it loads (`conversion_mapping.py`). Renaming,
stacking and joining along the first dimension change no bytes, so that blocks are still read in place. Rules that
change bytes (a transposition, a permutation, a split) are refused by name. Quantized matrices are mapped likewise, each
by the name of its full-precision weight.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from zinfer.weights import JoinedTensor, TensorEntry
from zinfer.weights.quantized import JoinedMatrix, StoredMatrix

# The chains of operations that only concatenate tensors, as (operation, dimension). After stacking along 0 and joining
# along 1, the tensors of one expert are neighbours.
_STACKED: Final = (("MergeModulelist", 0),)
_STACKED_AND_JOINED: Final = (("MergeModulelist", 0), ("Concatenate", 1))
_JOINED: Final = (("Concatenate", 0),)


def convert_names(
    model: PreTrainedModel, entries: Mapping[str, TensorEntry | StoredMatrix], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorEntry | JoinedTensor | StoredMatrix], dict[str, str]]:
    """Map tensors of a checkpoint to the module's names as transformers would.

    Args:
        entries: tensors whose own names are not the module's.
        shapes: of the module's tensors, by its names.

    Returns:
        the weights found, by the module's names, and why others were refused, by the checkpoint's names.
    """
    found: dict[str, TensorEntry | JoinedTensor | StoredMatrix] = {}
    refused: dict[str, str] = {}
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
            found[target] = entries[name]
        else:
            gathered[target][pattern].append(entries[name])
    for target, by_source in gathered.items():
        rule = by_pattern[next(iter(by_source))]
        lists = [by_source.get(pattern, []) for pattern in rule.source_patterns]
        made = _made(target, shapes[target], lists, rule)
        if isinstance(made, str):
            refused |= {piece.name: made for own in lists for piece in own}
        else:
            found[target] = made
    return found, refused


def _made(
    target: str, shape: tuple[int, ...], lists: Sequence[Sequence[TensorEntry | StoredMatrix]], rule: WeightConverter
) -> JoinedTensor | JoinedMatrix | str:
    """Return the weight that a rule makes of lists of tensors, one per pattern, or why it cannot be made."""
    chain = tuple((type(each).__name__, getattr(each, "dim", None)) for each in rule.operations)
    if chain not in (_STACKED, _JOINED, _STACKED_AND_JOINED):
        told = ", ".join(f"{name}(dim={dim})" if dim is not None else name for name, dim in chain)
        return f"{target} is made of it by {told}, which moves bytes around; that is not available yet"
    pieces = [piece for own in lists for piece in own]
    if chain == _STACKED_AND_JOINED and len({len(own) for own in lists}) == 1:
        pieces = [piece for expert in zip(*lists, strict=True) for piece in expert]
    if chain == _JOINED or all(len({piece.shape for piece in own}) == 1 for own in lists if own):
        joined = _joined(target, shape, pieces)
        if joined is not None:
            return joined
    return f"with the {len(pieces) - 1} others of {target} it does not make up {list(shape)}: {_reason(pieces)}"


def _joined(
    target: str, shape: tuple[int, ...], pieces: Sequence[TensorEntry | StoredMatrix]
) -> JoinedTensor | JoinedMatrix | None:
    matrices = [piece for piece in pieces if isinstance(piece, StoredMatrix)]
    if len(matrices) == len(pieces):
        return JoinedMatrix.join(target, shape, matrices)
    tensors = [piece for piece in pieces if isinstance(piece, TensorEntry)]
    return JoinedTensor.of(target, shape, tensors) if len(tensors) == len(pieces) else None


def _reason(pieces: Sequence[TensorEntry | StoredMatrix]) -> str:
    """Return why tensors were not joined, and what to do."""
    formats = {piece.format if isinstance(piece, StoredMatrix) else None for piece in pieces}
    remedy = "take the checkpoint in full precision and quantize it with `zinfer quantize`"
    if len(formats) > 1:
        return f"they are not all quantized alike; {remedy}"
    if any(format is not None and format.orders_columns for format in formats):
        return f"experts whose columns are in activation order (desc_act, actorder) are not read; {remedy}"
    return "some are missing, or config.json describes another model"
