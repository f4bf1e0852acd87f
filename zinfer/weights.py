"""Finds a checkpoint tensor for every parameter of a module: prefixes, ties, missing, spare and misshapen ones."""

import re
from collections.abc import Mapping
from typing import Final

from safetensors import safe_open
from transformers import PreTrainedModel

from zinfer.checkpoint import Checkpoint, TensorEntry
from zinfer.checkpoint.faults import listed
from zinfer.errors import CheckpointError

# Older checkpoints hold what is computed today: rotary frequencies, causal masks (transformers drops them likewise).
_SPARE_PATTERNS: Final = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)attn\.(masked_)?bias$",
    r"(^|\.)position_ids$",
)


def match_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The checkpoint tensor of each parameter and persistent buffer, by the module's name for it.

    A tied parameter that the checkpoint lacks takes the tensor of the one it is tied to, whichever way round. Where the
    checkpoint holds both, each takes its own, as transformers does when they differ.

    Raises:
        CheckpointError: weights are missing, left over, of another shape, or not floating-point where they must be.
    """
    wanted = _wanted(model)
    found: dict[str, TensorEntry] = {}
    spare: list[str] = []
    for name, entry in checkpoint.tensors.items():
        target = _module_name(name, wanted, model.base_model_prefix)
        if target is None:
            spare.append(name)
        elif target in found:
            raise CheckpointError(
                f"{entry.file}: {name} and {found[target].name} both hold the weights of {target}; remove one of them"
            )
        else:
            found[target] = entry
    _share_tied(model, found)
    _refuse_missing(checkpoint, [name for name in wanted if name not in found])
    _refuse_spare(checkpoint, spare, model)
    for name, entry in found.items():
        _check_form(name, entry, wanted[name])
    return found


def load_buffers(model: PreTrainedModel, weights: Mapping[str, TensorEntry]) -> None:
    """Copy the persistent buffers out of the checkpoint; they are small and stay in memory."""
    for name, buffer in model.named_buffers():
        if entry := weights.get(name):
            with safe_open(entry.file, framework="pt") as file:
                buffer.copy_(file.get_tensor(entry.name))


def _wanted(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape and floating-pointness of all that must come from the checkpoint."""
    state = model.state_dict(keep_vars=True)
    return {name: (tuple(value.shape), value.is_floating_point()) for name, value in state.items()}


def _module_name(name: str, wanted: Mapping[str, object], prefix: str) -> str | None:
    """The module's name for a checkpoint tensor: base models are saved without the prefix, and the other way round."""
    candidates = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    return next((candidate for candidate in candidates if candidate in wanted), None)


def _share_tied(model: PreTrainedModel, found: dict[str, TensorEntry]) -> None:
    ties: Mapping[str, str] = model.all_tied_weights_keys
    for _ in range(2):  # a second round reaches parameters tied to one that was itself absent
        for target, source in ties.items():
            for absent, present in ((target, source), (source, target)):
                if absent not in found and present in found:
                    found[absent] = found[present]


def _refuse_missing(checkpoint: Checkpoint, missing: list[str]) -> None:
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(missing)} weights are missing: {listed(missing)}. The checkpoint is "
            f"incomplete, or config.json describes another model"
        )


def _refuse_spare(checkpoint: Checkpoint, spare: list[str], model: PreTrainedModel) -> None:
    known = [*_SPARE_PATTERNS, *(model._keys_to_ignore_on_load_unexpected or ())]
    extra = [name for name in spare if not any(re.search(pattern, name) for pattern in known)]
    if extra:
        files = sorted({checkpoint.tensors[name].file.name for name in extra})
        raise CheckpointError(
            f"{checkpoint.folder}: {len(extra)} weights have no place in {type(model).__name__}: {listed(extra)} (in "
            f"{listed(files)}). config.json describes another model, or its family needs a conversion not available yet"
        )


def _check_form(name: str, entry: TensorEntry, wanted: tuple[tuple[int, ...], bool]) -> None:
    shape, floating = wanted
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
