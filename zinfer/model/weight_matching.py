"""Matches checkpoint tensors to a module's parameters: prefixes, ties, and errors for missing or wrong tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Final, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zinfer.errors import CheckpointError
from zinfer.model.conversion_mapping import convert_names
from zinfer.model.sharding.weights import CutTensor
from zinfer.weights import Checkpoint, JoinedTensor, TensorEntry
from zinfer.weights.folder import listed
from zinfer.weights.formats import Scheme
from zinfer.weights.quantized import StoredMatrix

Weight: TypeAlias = TensorEntry | JoinedTensor | CutTensor | StoredMatrix
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
    wanted = _wanted(model)
    found: dict[str, Weight] = {}
    holders: dict[str, str] = {}
    unplaced: dict[str, TensorEntry | StoredMatrix] = {}
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
        converted, refused = convert_names(model, unplaced, shapes)
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


def _stored_weights(checkpoint: Checkpoint, scheme: Scheme | None) -> dict[str, TensorEntry | StoredMatrix]:
    """Return the checkpoint's tensors by name, with the parts of a quantized parameter joined under its name."""
    if scheme is None:
        return dict(checkpoint.tensors)
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


def _refuse_spare(checkpoint: Checkpoint, unplaced: Iterable[TensorEntry | StoredMatrix], model: nn.Module) -> None:
    parts = [[part for _, part in each.parts] if isinstance(each, StoredMatrix) else [each] for each in unplaced]
    spare = [part.name for each in parts for part in each]
    known: list[str] = [*_SPARE_PATTERNS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    known += _predicting_layers(model)
    spare = [name for name in spare if name not in checkpoint.unnamed]
    extra = [name for name in spare if not any(re.search(pattern, name) for pattern in known)]
    if extra:
        files = sorted({checkpoint.tensors[name].file.name for name in extra})
        raise CheckpointError(
            f"{checkpoint.folder}: {len(extra)} weights have no place in {type(model).__name__}: {listed(extra)} (in "
            f"{listed(files)}). config.json describes another model, or its family needs a conversion not available yet"
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


def _check_form(name: str, entry: TensorEntry | JoinedTensor | CutTensor, wanted: tuple[tuple[int, ...], bool]) -> None:
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
            f"{'' if floating else 'not '}floating-point: quantized checkpoints are not supported yet"
        )


def _check_stored(name: str, matrix: StoredMatrix, model: nn.Module) -> None:
    module = model.get_submodule(name.rpartition(".")[0])
    wanted = tuple(model.get_parameter(name).shape)
    shape = (matrix.columns, matrix.rows) if isinstance(module, Conv1D) else (matrix.rows, matrix.columns)
    if shape != (prod(wanted[:-1]), wanted[-1]):  # experts are stored one below the other
        raise CheckpointError(
            f"{matrix.file}: {matrix.name} has shape {list(shape)}, the model's {name} has {list(wanted)}: "
            f"config.json describes another model, or the file is damaged"
        )
