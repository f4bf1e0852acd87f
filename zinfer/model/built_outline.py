"""Outlines of models whose transformers modules are built, on the meta device: of a checkpoint or of config.json alone.

Without weight files, their layout is made up: every parameter once, end to end in one safetensors file, in the model's
order. Partitioning and planning then run the same code as on a real checkpoint. No weights are read here.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError
from zinfer.model.build import build_meta_model
from zinfer.model.context_length import max_positions
from zinfer.model.families import check_stages, choosing_tokens
from zinfer.model.known_models import KNOWN_MODELS, KnownModel, known_config
from zinfer.model.matching import Weight, holds_transpose, match_weights
from zinfer.model.outline import MADE_UP_NAME, MADE_UP_OFFSET, STORED_NAME, Outline
from zinfer.model.partition import ModelBlock, partition_model
from zinfer.model.quantize import KEPT_MODULES
from zinfer.model.spec import ModelSpec
from zinfer.model.stage import Stage, StageModel
from zinfer.offload.block import Extent
from zinfer.weights import Checkpoint, TensorEntry
from zinfer.weights.checkpoint import read_config
from zinfer.weights.folder import CONFIG_NAME, find_folder, name_on_hub
from zinfer.weights.hub import is_offline, lacks_weights
from zinfer.weights.quantized import find_stored_scheme


@dataclass(frozen=True)
class BuiltModel:
    """A module tree and its weights, left as they are; makes the blocks of outlines.

    Attributes:
        tree: on the meta device.
        weights: of the checkpoint, or made up.
        folder: the model's, where its packed store is assumed to be.
        stored: how matrices of made-up weights are stored, unless a plan states otherwise; None: in full.
        in_blocks: whether weights in GGUF's blocks stay so, where nothing is quantized.
    """

    tree: PreTrainedModel
    weights: Mapping[str, Weight]
    folder: Path
    stored: Quantization | None = None
    in_blocks: bool = False

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters, tied ones too."""
        return [name for name, _ in self.tree.named_parameters(remove_duplicate=False)]

    def blocks(self, quantization: Quantization | None) -> tuple[ModelBlock, ...]:
        """Partition the model. Raises ConfigError if groups do not divide its matrices."""
        return self._partition(self.weights, quantization)

    def of_stage(self, stage: Stage, quantization: Quantization | None) -> tuple[tuple[ModelBlock, ...], ModelSpec]:
        """Return the blocks and the spec of one stage of a pipeline. Raises ConfigError as `StageModel`."""
        check_stages(self.tree)
        part = StageModel(self.tree, stage)
        part.apply()
        try:
            return self._partition(part.own(self.weights), quantization), ModelSpec.of(self.tree)
        finally:
            part.undo()

    def _partition(self, weights: Mapping[str, Weight], quantization: Quantization | None) -> tuple[ModelBlock, ...]:
        rules = quantization or self.stored
        blocks = partition_model(self.tree, weights, rules, in_blocks=self.in_blocks and rules is None)
        return tuple(_as_in_store(block, self.folder) for block in blocks)


def built_outline(
    model: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
    *,
    in_blocks: bool = False,
    asks_hub: bool = False,
) -> Outline:
    """Read the outline of a checkpoint, or of a folder with config.json and no safetensors; as `read_outline`."""
    folder, name, is_made_up = find_folder(model), name_on_hub(model), False
    if lacks_weights(model):
        if asks_hub and name is not None and not is_offline() and _is_vague(Checkpoint(folder, {}, {}, ""), dtype):
            checkpoint = Checkpoint.on_hub(name, folder)
            tree = build_meta_model(checkpoint, dtype)
        else:
            (tree, checkpoint), is_made_up = made_up_model(folder, dtype), True
    else:
        checkpoint = Checkpoint.open(model)
        tree = build_meta_model(checkpoint, dtype)
    scheme = find_stored_scheme(checkpoint)
    stored = scheme.planned if scheme is not None and is_made_up else None
    built = BuiltModel(tree, match_weights(tree, checkpoint, scheme), folder, stored, in_blocks)
    return Outline(
        name=os.fspath(model),
        blocks=built.blocks(quantization),
        spec=ModelSpec.of(tree),
        dtype=tree.config.dtype,
        max_positions=_longest(tree),
        files=tuple(checkpoint.files),
        model=built,
    )


def _longest(tree: PreTrainedModel) -> int | None:
    """Return the positions that passes can use: no more than keys are chosen of without an index in pages."""
    chosen = choosing_tokens(tree.config.get_text_config(decoder=True))
    return min((each for each in (max_positions(tree), chosen) if each is not None), default=None)


def known_outline(
    known: KnownModel, dtype: torch.dtype | None = None, quantization: Quantization | None = None
) -> Outline:
    """Build the outline of a published model; as `read_outline`."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / CONFIG_NAME).write_text(json.dumps(known_config(known)))
        return replace(built_outline(temporary, dtype, quantization), name=known.name)


def made_up_model(folder: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Checkpoint]:
    """Return the model that config.json describes, and a checkpoint of its tensors in a file that is not there.

    Weights in the folder are ignored.

    Args:
        folder: an absolute path; holds config.json.
        dtype: of parameters; None takes config.json's.

    Raises:
        CheckpointError: as `read_outline`.
    """
    bare = Checkpoint(folder, {}, {}, "")
    if (unsaid := _unsaid(bare, dtype)) is not None:
        raise CheckpointError(f"{bare.config_path}: {unsaid}")
    tree = build_meta_model(bare, dtype)
    return tree, replace(bare, tensors=_made_up_tensors(tree, folder / MADE_UP_NAME))


def _as_in_store(block: ModelBlock, folder: Path) -> ModelBlock:
    """Return the block as a packed store would hold it, without conversion at load."""
    if block.block.conversion is None:
        return block
    layout = block.block.layout
    extent = Extent(folder / MADE_UP_NAME, MADE_UP_OFFSET, layout.nbytes, torch.uint8, 0, torch.uint8)
    return replace(block, block=replace(block.block, extents=(extent,), conversion=None))


def _made_up_tensors(model: PreTrainedModel, file: Path) -> dict[str, TensorEntry]:
    """Return a place in ``file`` for each tensor of the model, end to end in its order, without tied ones."""
    tensors: dict[str, TensorEntry] = {}
    offset = MADE_UP_OFFSET
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in model.all_tied_weights_keys:
            tensors[name] = TensorEntry(name, value.dtype, tuple(value.shape), file, offset, value.nbytes)
            offset += value.nbytes
    return tensors


def _is_vague(checkpoint: Checkpoint, dtype: torch.dtype | None) -> bool:
    """Return whether files tell more of the weights' dtypes than config.json: of formats, which weights have them."""
    return find_stored_scheme(checkpoint) is not None or _unsaid(checkpoint, dtype) is not None


def _unsaid(checkpoint: Checkpoint, dtype: torch.dtype | None) -> str | None:
    """Return what config.json alone does not say of the weights' dtypes, and the remedy; None: it says all."""
    config = read_config(checkpoint.config_path)
    scheme = find_stored_scheme(checkpoint)
    if scheme is not None and scheme.planned is None:
        return (
            "quantization_config says that weights are quantized, but which of them only their files tell, and there "
            "are none beside it; plan with the whole checkpoint, or remove quantization_config from a copy and state "
            '"zinfer": {"quantization": {"bits": 4, "group_size": 128}} in the configuration'
        )
    if dtype is None and not (config.get("dtype") or config.get("torch_dtype")):
        return (
            'states no dtype, and there are no weights beside it to tell; add "dtype": "bfloat16" to it, or state '
            "dtype in the configuration"
        )
    return None


def outline_document(outline: Outline) -> dict[str, Any]:
    """Return the outline of a published model as JSON, from which `zinfer.model.outline` makes it again.

    Blocks that follow one another with the same tensors, at equal distances in the file, are stored once, with a count.
    """
    dtype = str(outline.dtype).removeprefix("torch.")
    blocks = [block for block in outline.blocks if isinstance(block, ModelBlock)]
    prefixes = [f"{each.block.name}." if each.is_layer else "" for each in blocks]
    owned = {
        f"{prefix}{tensor.name}"
        for prefix, each in zip(prefixes, blocks, strict=True)
        for tensor in each.block.layout.tensors
    }
    return {
        "dtype": dtype,
        "max_positions": outline.max_positions,
        "spec": outline.spec.as_document(),
        "tied": [name for name in outline.model.parameter_names if name not in owned],
        "blocks": list(_joined([_block_document(block, dtype) for block in blocks])),
    }


def _block_document(block: ModelBlock, dtype: str) -> dict[str, Any]:
    own, modules = block.block, dict[str, Any]()
    for binding in block.bindings:
        modules.setdefault(binding.tensor, binding.module)
    assert len(own.extents) == len(own.layout.tensors), "one extent a tensor, in the order of the slab"
    begin = end = own.extents[0].offset
    tensors: list[list[Any]] = []
    for tensor, extent in zip(own.layout.tensors, own.extents, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        more: dict[str, Any] = {"dtype": kind} if kind != dtype else {}
        more |= {"skipped": extent.offset - end} if extent.offset != end else {}
        more |= {"is_kept": True} if isinstance(modules[tensor.name], KEPT_MODULES) else {}
        more |= {"is_transposed": True} if holds_transpose(modules[tensor.name], len(tensor.shape)) else {}
        tensors.append([tensor.name, list(tensor.shape), *([more] if more else [])])
        end = extent.offset + extent.nbytes
    facts = {"is_layer": block.is_layer, "is_looked_up": block.is_looked_up, "encloses": own.encloses}
    return {
        "name": own.name,
        "begin": begin,
        "num_uses": block.num_uses,
        **{name: True for name, value in facts.items() if value},
        "tensors": tensors,
    }


def _joined(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the entries, consecutive ones with the same tensors as one with their number and distance."""
    for _, group in groupby(
        entries, key=lambda entry: {name: entry[name] for name in entry.keys() - {"name", "begin"}}
    ):
        alike = list(group)
        first, count = alike[0], len(alike)
        if count == 1:
            yield first
            continue
        template, _, number = first["name"].rpartition(".")
        pitch = alike[1]["begin"] - first["begin"]
        for index, entry in enumerate(alike):
            assert entry["name"] == f"{template}.{int(number) + index}", "layers are numbered"
            assert entry["begin"] == first["begin"] + index * pitch, "layers follow one another"
        yield {**first, "count": count, "pitch": pitch}


def main() -> None:
    """Write the outlines of all published models that can be planned."""
    path = Path(__file__).with_name(STORED_NAME)
    found = {each.name: known_outline(each) for each in KNOWN_MODELS.values() if each.config is not None}
    lines = [
        f"{json.dumps(name)}: {json.dumps(outline_document(each), separators=(',', ':'))}"
        for name, each in found.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{path}: {len(lines)} outlines")


if __name__ == "__main__":
    main()
