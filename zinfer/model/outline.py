"""The outline of a model for planning: its blocks, widths and limits, from a checkpoint or from config.json alone.

Without weight files, their layout is made up: every parameter once, end to end in one safetensors file, in the model's
order. Partitioning and planning then run the same code as on a real checkpoint. No weights are read here.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from zinfer.checkpoint import Checkpoint, TensorEntry
from zinfer.checkpoint.config_checks import read_config
from zinfer.checkpoint.folder import CONFIG_NAME, absolute, find_folder, holds_config_alone, resolve_folder
from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.build import build_meta_model
from zinfer.model.context_length import check_min_out_tokens, max_positions
from zinfer.model.experts import check_num_experts
from zinfer.model.known_models import find_known_model, known_config
from zinfer.model.layers import check_classes
from zinfer.model.partition import ModelBlock, partition_model
from zinfer.model.quantized_forms import check_patterns
from zinfer.model.spec import ModelSpec
from zinfer.model.stage import Stage, StageModel
from zinfer.model.weight_matching import Weight, match_weights
from zinfer.offload.block import Block, Extent
from zinfer.quantization.stored import find_stored_scheme
from zinfer.requests.length_limits import LengthLimits

_MADE_UP_NAME: Final = "model.safetensors"
# Where a file's weights would begin: past the header's length, and not aligned to pages, as in real files.
_MADE_UP_OFFSET: Final = 8


@dataclass(frozen=True)
class Outline:
    """The facts about a model that planning needs.

    Attributes:
        name: the folder, or the hub name as it was given.
        blocks: all blocks, in the model's order.
        spec: its widths.
        dtype: of weights, activations and cache.
        max_positions: number of positions; None without a limit.
        files: the checkpoint's; empty if the weights' layout is made up.
        tree, weights: the module tree and weights that were partitioned; left as they are.
    """

    name: str
    blocks: tuple[ModelBlock, ...]
    spec: ModelSpec
    dtype: torch.dtype
    max_positions: int | None
    files: tuple[Path, ...]
    tree: PreTrainedModel = field(repr=False, compare=False)
    weights: Mapping[str, Weight] = field(repr=False, compare=False)

    def quantized(self, quantization: Quantization) -> "Outline":
        """Return the outline with full-precision matrices stored quantized.

        Raises:
            ConfigError: groups do not divide its matrices.
        """
        return replace(self, blocks=_partition(self.tree, self.weights, quantization, self.folder))

    def of_stage(self, stage: Stage, quantization: Quantization | None = None) -> "Outline":
        """Return the outline of one stage of a pipeline, which is a shorter model.

        Raises:
            ConfigError: as `StageModel`; or as `quantized`.
        """
        part = StageModel(self.tree, stage)
        part.apply()
        try:
            blocks = _partition(self.tree, part.own(self.weights), quantization, self.folder)
            return replace(self, blocks=blocks, spec=ModelSpec.of(self.tree))
        finally:
            part.undo()

    @property
    def folder(self) -> Path:
        """The model's folder, where its packed store is assumed to be."""
        return absolute(self.name)

    def limits(self, settings: Settings) -> LengthLimits:
        """Return the limits of a request's lengths under a configuration."""
        return LengthLimits.of_decoder(self.max_positions, settings.max_out_tokens)

    @property
    def plain_blocks(self) -> list[Block]:
        """The blocks without the modules that use them."""
        return [block.block for block in self.blocks]

    @property
    def layers(self) -> list[int]:
        """Indices of the blocks that are transformer layers."""
        return [block.block.index for block in self.blocks if block.is_layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(block.block.nbytes for block in self.blocks)


def read_outline(
    model: str | os.PathLike[str], dtype: torch.dtype | None = None, quantization: Quantization | None = None
) -> Outline:
    """Read the outline of a checkpoint, of a folder with config.json and no safetensors, or of a published model.

    Args:
        model: as `zinfer.init_inference` takes it, a folder with config.json alone, or a name that `find_known_model`
            knows.
        dtype: that the weights are cast to; None takes the checkpoint's own.
        quantization: which matrices are stored quantized; they are planned as if a store of them was on disk.

    Raises:
        CheckpointError: config.json is missing, describes no model, states no dtype or asks for quantized weights
            that a run refuses; or the checkpoint is damaged.
        PlanError: the model is no decoder that generates, or keeps a state other than keys and values.
    """
    if (known := find_known_model(model)) is not None:
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / CONFIG_NAME).write_text(json.dumps(known_config(known)))
            return replace(read_outline(temporary, dtype, quantization), name=known.name)
    folder = find_folder(model)
    if holds_config_alone(folder):
        tree, checkpoint = made_up_model(folder, dtype)
    else:
        checkpoint = Checkpoint.open(model)
        tree = build_meta_model(checkpoint, dtype)
    weights = match_weights(tree, checkpoint, find_stored_scheme(checkpoint))
    return Outline(
        name=os.fspath(model),
        blocks=_partition(tree, weights, quantization, folder),
        spec=ModelSpec.of(tree),
        dtype=tree.config.dtype,
        max_positions=max_positions(tree),
        files=tuple(checkpoint.files),
        tree=tree,
        weights=weights,
    )


def check_settings(outline: Outline, settings: Settings) -> None:
    """Refuse what a run refuses of a configuration because of the model.

    Raises:
        ConfigError, CheckpointError: as a run.
    """
    if settings.checkpoint is not None:
        raise ConfigError(f"checkpoint: the model is given as a folder ({outline.name}) already; remove one of the two")
    check_classes(outline.tree, settings.block_classes)
    check_min_out_tokens(outline.tree, settings.min_out_tokens)
    check_num_experts(outline.tree, settings.num_experts)
    check_patterns(settings.quantization, outline.tree)
    if settings.batching.draft_model is not None:
        resolve_folder(settings.batching.draft_model)


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
    _check_config(bare, dtype)
    tree = build_meta_model(bare, dtype)
    return tree, replace(bare, tensors=_made_up_tensors(tree, folder / _MADE_UP_NAME))


def _partition(
    tree: PreTrainedModel, weights: Mapping[str, Weight], quantization: Quantization | None, folder: Path
) -> tuple[ModelBlock, ...]:
    return tuple(_as_in_store(block, folder) for block in partition_model(tree, weights, quantization))


def _as_in_store(block: ModelBlock, folder: Path) -> ModelBlock:
    """Return the block as a packed store would hold it, without conversion at load."""
    if block.block.conversion is None:
        return block
    layout = block.block.layout
    extent = Extent(folder / _MADE_UP_NAME, _MADE_UP_OFFSET, layout.nbytes, torch.uint8, 0, torch.uint8)
    return replace(block, block=replace(block.block, extents=(extent,), conversion=None))


def _made_up_tensors(model: PreTrainedModel, file: Path) -> dict[str, TensorEntry]:
    """Return a place in ``file`` for each tensor of the model, end to end in its order, without tied ones."""
    tensors: dict[str, TensorEntry] = {}
    offset = _MADE_UP_OFFSET
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in model.all_tied_weights_keys:
            tensors[name] = TensorEntry(name, value.dtype, tuple(value.shape), file, offset, value.nbytes)
            offset += value.nbytes
    return tensors


def _check_config(checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
    """Raise CheckpointError if config.json alone does not tell the dtype of each weight."""
    path = checkpoint.config_path
    config = read_config(path)
    if find_stored_scheme(checkpoint) is not None:
        raise CheckpointError(
            f"{path}: quantization_config says that weights are quantized, but which of them only their files tell, "
            f"and there are none beside it; plan with the whole checkpoint, or remove quantization_config from a copy "
            f'and state "zinfer": {{"quantization": {{"bits": 4, "group_size": 128}}}} in the configuration'
        )
    if dtype is None and not (config.get("dtype") or config.get("torch_dtype")):
        raise CheckpointError(
            f"{path}: states no dtype, and there are no weights beside it to tell; add "
            f'"dtype": "bfloat16" to it, or state dtype in the configuration'
        )
