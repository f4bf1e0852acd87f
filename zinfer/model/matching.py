"""Matches checkpoint tensors to a module's parameters: prefixes, ties, and errors for missing or wrong tensors.

transformers renames tensors, stacks experts and joins matrices while it loads (`conversion_mapping.py`). Renaming,
stacking and joining along the first dimension change no bytes, so that blocks are still read in place. Rules that
change bytes (a transposition, a permutation, a split) are refused by name. Quantized matrices are mapped likewise, each
by the name of its full-precision weight.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from zinfer.errors import CheckpointError
from zinfer.model.sharding.weights import CutTensor
from zinfer.model.text_side import text_rules, text_weights
from zinfer.weights import Checkpoint, JoinedTensor, TensorEntry
from zinfer.weights.folder import listed
from zinfer.weights.formats import Scheme
from zinfer.weights.formats.gguf import EncodedTensor
from zinfer.weights.quantized import JoinedMatrix, StoredMatrix

Stored: TypeAlias = TensorEntry | StoredMatrix | EncodedTensor
"""What a checkpoint holds under a name."""
_Joined: TypeAlias = JoinedTensor | JoinedMatrix | EncodedTensor
# The chains of operations that only concatenate tensors, as (operation, dimension). After stacking along 0 and joining
# along 1, the tensors of one expert are neighbours.
_STACKED: Final = (("MergeModulelist", 0),)
_STACKED_AND_JOINED: Final = (("MergeModulelist", 0), ("Concatenate", 1))
_JOINED: Final = (("Concatenate", 0),)


def convert_names(
    model: PreTrainedModel,
    entries: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    more: Sequence[WeightTransform] = (),
) -> tuple[dict[str, Stored | _Joined], dict[str, str]]:
    """Map tensors of a checkpoint to the module's names as transformers would.

    Args:
        entries: tensors whose own names are not the module's.
        shapes: of the module's tensors, by its names.
        more: rules that follow the model's own.

    Returns:
        the weights found, by the module's names, and why others were refused, by the checkpoint's names.
    """
    found: dict[str, Stored | _Joined] = {}
    refused: dict[str, str] = {}
    rules = [*get_model_conversion_mapping(model), *more] if entries else []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    gathered: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
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
    target: str, shape: tuple[int, ...], lists: Sequence[Sequence[Stored]], rule: WeightConverter
) -> _Joined | str:
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


def _joined(target: str, shape: tuple[int, ...], pieces: Sequence[Stored]) -> _Joined | None:
    matrices = [piece for piece in pieces if isinstance(piece, StoredMatrix)]
    if len(matrices) == len(pieces):
        return JoinedMatrix.join(target, shape, matrices)
    encoded = [piece for piece in pieces if isinstance(piece, EncodedTensor)]
    if len(encoded) == len(pieces):
        return EncodedTensor.join(target, shape, encoded)
    tensors = [piece for piece in pieces if isinstance(piece, TensorEntry)]
    return JoinedTensor.of(target, shape, tensors) if len(tensors) == len(pieces) else None


def _reason(pieces: Sequence[Stored]) -> str:
    """Return why tensors were not joined, and what to do."""
    formats = {piece.format if isinstance(piece, StoredMatrix) else None for piece in pieces}
    remedy = "take the checkpoint in full precision and quantize it with `zinfer quantize`"
    if len(formats) > 1:
        return f"they are not all quantized alike; {remedy}"
    if any(format is not None and format.orders_columns for format in formats):
        return f"experts whose columns are in activation order (desc_act, actorder) are not read; {remedy}"
    return "some are missing, or config.json describes another model"


Weight: TypeAlias = TensorEntry | JoinedTensor | CutTensor | StoredMatrix | EncodedTensor
"""Where the values of a parameter are stored."""

# Older checkpoints hold tensors computed today: rotary frequencies, causal masks (transformers drops them too).
_SPARE_PATTERNS: Final = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)attn\.(masked_)?bias$",
    r"(^|\.)position_ids$",
    # Training heads beside the one that config.json names: BERT's poolers and next-sentence heads.
    r"(^|\.)pooler\.",
    r"^cls\.seq_relationship\.",
)


def match_weights(model: nn.Module, checkpoint: Checkpoint, scheme: Scheme | None = None) -> dict[str, Weight]:
    """Return the checkpoint's weight of each parameter and persistent buffer, by the module's names.

    Args:
        scheme: how quantized parameters are stored, if any are.

    A parameter that the checkpoint lacks takes the tensor of its other name in the module, or of the parameter that it
    is tied to, in either direction. If the checkpoint holds both, each takes its own, as in transformers when they
    differ.

    Raises:
        CheckpointError: weights are missing, left over, of another shape, or unexpectedly (not) floating-point.
    """
    rules, wanted = text_rules(checkpoint, model), _wanted(model)
    checkpoint = text_weights(checkpoint, model)
    found: dict[str, Weight] = {}
    holders: dict[str, str] = {}
    unplaced: dict[str, Stored] = {}
    for name, entry in _stored_weights(checkpoint, scheme).items():
        target = _module_name(name, wanted, getattr(model, "base_model_prefix", ""))
        if target is None:
            unplaced[name] = entry
        elif target in found:
            raise CheckpointError(
                f"{entry.file}: {name} and {holders[target]} both hold the weights of {target}; remove one of them"
            )
        else:
            found[target], holders[target] = entry, name
    if isinstance(model, PreTrainedModel):
        shapes = {name: shape for name, (shape, _) in wanted.items() if name not in found}
        converted, refused = convert_names(model, unplaced, shapes, rules)
        for name, reason in refused.items():
            raise CheckpointError(f"{unplaced[name].file}: {name}: {reason} ({len(refused)} tensors are like it)")
        found |= converted
        for made in converted.values():
            for piece in made.pieces:
                unplaced.pop(piece.name)
    _share_tied(model, found)
    if scheme is not None:
        _refuse_unscaled(found.values())
    if missing := [name for name in wanted if name not in found]:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(missing)} weights are missing: {listed(missing)}. The checkpoint is "
            f"incomplete, or config.json describes another model{_said_of_index(checkpoint)}"
        )
    _refuse_spare(checkpoint, unplaced.values(), model)
    found = _of_places(found)
    for name, weight in found.items():
        if isinstance(weight, StoredMatrix):
            _check_stored(name, weight, model)
        else:
            _check_form(name, weight, wanted[name])
    return found


def load_buffers(model: nn.Module, weights: Mapping[str, Weight], device: torch.device) -> None:
    """Load the persistent buffers from the checkpoint, and move all buffers to the device for good."""
    for name, buffer in model.named_buffers():
        entry = weights.get(name)
        if isinstance(entry, TensorEntry):
            buffer.copy_(entry.read())
    moved = {buffer: buffer.to(device) for buffer in model.buffers()}  # a shared buffer stays shared
    for module in model.modules():
        for name, held in module._buffers.items():
            module._buffers[name] = None if held is None else moved[held]


def _stored_weights(checkpoint: Checkpoint, scheme: Scheme | None) -> Mapping[str, Stored]:
    """Return the checkpoint's tensors by name, with the parts of a quantized parameter joined under its name."""
    if scheme is None:
        encoded = {
            name: EncodedTensor.of(name, form, [checkpoint.tensors[part.name] for part in form.parts])
            for name, form in checkpoint.encoded.items()
        }
        blocks = {entry.name for each in encoded.values() for entry in each.blocks}
        return {name: entry for name, entry in checkpoint.tensors.items() if name not in blocks} | encoded
    joined = {
        parameter: StoredMatrix.of(
            parameter, scheme, {part: checkpoint.tensors[tensor] for part, tensor in parts.items()}
        )
        for parameter, parts in scheme.stored(checkpoint.tensors.keys()).items()
    }
    taken = {part.name for matrix in joined.values() for _, part in matrix.parts}
    taken.update(scheme.set_aside(checkpoint.tensors.keys()))
    return {name: entry for name, entry in checkpoint.tensors.items() if name not in taken} | joined


def _wanted(model: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return, for each tensor that the checkpoint must hold, its shape and whether it is floating-point."""
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name}: the module keeps a {type(value).__name__} there (get_extra_state), and a checkpoint holds "
                f"tensors alone; leave the checkpoint out for a module whose weights are in memory"
            )
    return {name: (tuple(value.shape), value.is_floating_point()) for name, value in state.items()}


def _module_name(name: str, wanted: Mapping[str, object], prefix: str) -> str | None:
    """Return the module's name for a checkpoint tensor, with or without the base model's prefix."""
    candidates = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    return next((candidate for candidate in candidates if candidate in wanted), None)


def _share_tied(model: nn.Module, found: dict[str, Weight]) -> None:
    tied = model.all_tied_weights_keys if isinstance(model, PreTrainedModel) else {}
    ties = [*_other_names(model), *tied.items()]  # the model may share others than its family ties
    known = -1
    while len(found) != known:  # a further round reaches parameters tied to one that was itself absent
        known = len(found)
        for target, source in ties:
            for absent, present in ((target, source), (source, target)):
                if absent not in found and present in found:
                    found[absent] = found[present]


def _of_places(found: Mapping[str, Weight]) -> dict[str, Weight]:
    """Give parameters stored in one place one entry: `torch.save` keeps the tensors of a tie under both names."""
    first: dict[TensorEntry, TensorEntry] = {}
    return {
        name: first.setdefault(replace(weight, name=""), weight) if isinstance(weight, TensorEntry) else weight
        for name, weight in found.items()
    }


def _other_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each further name of a parameter or buffer, with its first one; shared modules have several."""
    first: dict[torch.Tensor, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if first.setdefault(value, name) != name:
            yield name, first[value]


def _refuse_spare(checkpoint: Checkpoint, unplaced: Iterable[Stored], model: nn.Module) -> None:
    parts = [[part for _, part in each.parts] if isinstance(each, StoredMatrix) else [each] for each in unplaced]
    files = {part.name: part.file.name for each in parts for part in each}
    spare = list(files)
    known: list[str] = [*_SPARE_PATTERNS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    known += _predicting_layers(model)
    spare = [name for name in spare if name not in checkpoint.unnamed]
    extra = [name for name in spare if not any(re.search(pattern, name) for pattern in known)]
    if extra:
        where = listed(sorted({files[name] for name in extra}))
        raise CheckpointError(
            f"{checkpoint.folder}: {len(extra)} weights have no place in {type(model).__name__}: {listed(extra)} (in "
            f"{where}). config.json describes another model, or its family needs a conversion not available yet"
        )


def _predicting_layers(model: nn.Module) -> Iterator[str]:
    """Yield a pattern of names for each layer that predicts further tokens (MTP); they follow the model's own."""
    if isinstance(model, PreTrainedModel):
        config = model.config.get_text_config()
        first, count = getattr(config, "num_hidden_layers", 0), getattr(config, "num_nextn_predict_layers", None)
        yield from (rf"(^|\.)layers\.{first + number}\." for number in range(count or 0))


def _refuse_unscaled(weights: Iterable[Weight]) -> None:
    for weight in weights:
        if not isinstance(weight, StoredMatrix) and weight.dtype.is_floating_point and weight.dtype.itemsize == 1:
            raise CheckpointError(
                f"{weight.file}: {weight.name} at byte {weight.offset} is {weight.dtype}, and no scale of it is stored "
                "(weight_scale_inv, weight_scale): the checkpoint is incomplete, download it again"
            )


def _said_of_index(checkpoint: Checkpoint) -> str:
    if not checkpoint.absent:
        return ""
    files = listed(sorted(set(checkpoint.absent.values())))
    return (
        f"; its index says that {files} has {listed(sorted(checkpoint.absent))}, which no file holds: index and shards "
        "are of different versions, download both again"
    )


def _check_form(
    name: str, entry: TensorEntry | JoinedTensor | CutTensor | EncodedTensor, wanted: tuple[tuple[int, ...], bool]
) -> None:
    shape, floating = wanted
    if len(shape) == 3 and entry.shape == (shape[0], shape[2], shape[1]) != shape:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)}, the transpose of each of the model's {name} "
            f"({list(shape)}), as experts of Qwen3-VL-MoE are published; transposed experts are not read yet. Write "
            "its tensor.transpose(1, 2).contiguous() under the same name, with all others that are so, into a copy"
        )
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: {entry.name} at byte {entry.offset} has shape {list(entry.shape)}, the model's {name} has "
            f"{list(shape)}: config.json describes another model, or the file is damaged"
        )
    if entry.dtype.is_floating_point != floating:
        raise CheckpointError(
            f"{entry.file}: {entry.name} at byte {entry.offset} is {entry.dtype}, but the model's {name} is "
            f"{'' if floating else 'not '}floating-point: config.json does not say how weights are quantized "
            "(quantization_config), or the file is damaged; download both again"
        )


def holds_transpose(module: nn.Module, num_dims: int) -> bool:
    """Return whether a module's parameter is the transpose of a matrix, or those of its experts' (gpt-oss)."""
    is_of_experts = num_dims == 3 and bool(getattr(module, "is_transposed", False))
    return isinstance(module, Conv1D) or is_of_experts


def _check_stored(name: str, matrix: StoredMatrix, model: nn.Module) -> None:
    module, wanted = model.get_submodule(name.rpartition(".")[0]), tuple(model.get_parameter(name).shape)
    shape = (matrix.rows, matrix.columns)
    natural = (*wanted[:-2], wanted[-1], wanted[-2]) if holds_transpose(module, len(wanted)) else wanted
    if shape != (prod(natural[:-1]), natural[-1]):  # experts are stored one below the other
        raise CheckpointError(
            f"{matrix.file}: {matrix.name} has shape {list(shape)}, the model's {name} has {list(wanted)}: "
            f"config.json describes another model, or the file is damaged"
        )
