"""The checkpoint that a store is made from, partitioned into the store's blocks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from zinfer.checkpoint import Checkpoint, TensorEntry
from zinfer.checkpoint.folder import absolute
from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.build import build_meta_model
from zinfer.model.partition import ModelBlock, find_extents, partition_model
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.grain import Grain
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.weight_matching import Weight, match_weights
from zinfer.offload.block import Block, SlabLayout
from zinfer.quantization.conversion import Squares
from zinfer.quantization.native.manifest import MANIFEST_NAME, StoredParameter
from zinfer.quantization.slab_matrix import SlabMatrix
from zinfer.quantization.stored import StoredMatrix, find_stored_scheme
from zinfer.store.files import BlockFile, name_prefix


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
        checkpoint: the files and tensors.
        rules: which weights to quantize.
        dtype: that products are computed in, and full-precision weights are stored in.
        files: of the store, one per block.
        parameters: the quantized parameters of the store.
        num_taken_over: number of them that the source holds quantized already.
    """

    checkpoint: Checkpoint
    rules: Quantization
    dtype: torch.dtype
    files: tuple[BlockFile, ...]
    parameters: Mapping[str, StoredParameter]
    num_taken_over: int

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str],
        settings: Settings,
        squares: Squares | None = None,
        shard: Shard | None = None,
    ) -> "Source":
        """Read the headers and partition the model.

        Args:
            model: the checkpoint.
            settings: what to quantize.
            squares: the result of a calibration, used when a weight is quantized; None: no columns are scaled.
            shard: the rank whose part of each layer is stored; None: whole layers.

        Raises:
            ConfigError: the settings quantize nothing, or cannot be applied to this model.
            CheckpointError: the checkpoint is incomplete, damaged, a store itself, or of a model that transformers
                cannot build.
        """
        if shard is None:
            _refuse_store(absolute(model))  # also an unfinished one
        rules = settings.quantization
        if rules is None:
            raise ConfigError("the configuration asks for no quantized weights; state zinfer.quantization.bits in it")
        if any(rule.group_dim == 0 for rule in rules.rules):
            raise ConfigError(
                "group_dim = 0: weights whose rows share scales are not written to a folder; set it to 1, or have them "
                'quantized while they are loaded (zero_optimization.offload_param.device "cpu", or none)'
            )
        checkpoint = Checkpoint.open(model)
        if shard is None:
            _refuse_store(checkpoint.folder)
        tree = build_meta_model(checkpoint, settings.dtype)
        weights = match_weights(tree, checkpoint, find_stored_scheme(checkpoint))
        if rules is not None:
            rules.check_patterns(name for name, _ in tree.named_parameters(remove_duplicate=False))
        if shard is not None:
            sharding = Sharding.of(tree, shard, grain=Grain.of(rules, weights), stated=settings.tensor_parallel)
            weights = sharding.cut_weights(weights)
            sharding.apply(tree)
        blocks = partition_model(tree, weights, rules, squares)
        blocks += _buffers(tree, weights, len(blocks))
        parameters = {
            name_prefix(block) + tensor.name: StoredParameter(format=tensor.format, columns=tensor.columns)
            for block in blocks
            for tensor in block.block.layout.tensors
            if isinstance(tensor, SlabMatrix)
        }
        if not parameters and shard is None:
            raise ConfigError(
                f"{checkpoint.folder}: these settings quantize no weight of this model; correct include and exclude"
            )
        num_taken_over = sum(isinstance(weight, StoredMatrix) for weight in weights.values())
        files = tuple(BlockFile.of(block, len(blocks)) for block in blocks)
        return cls(checkpoint, rules, tree.config.dtype, files, parameters, num_taken_over)


def part_of(shard: Shard | None, settings: Settings) -> str | None:
    """Return what identifies a rank's part of each layer; None for whole layers."""
    stated = settings.tensor_parallel.specs, settings.tensor_parallel.preset
    plan = "" if stated == (None, None) else f", divided by {stated}"
    return None if shard is None else f"{shard}{plan}"


def _refuse_store(folder: Path) -> None:
    if (folder / MANIFEST_NAME).is_file():
        raise CheckpointError(f"{folder}: already quantized, a store of zinfer's; name the model that it was made of")


def _buffers(tree: PreTrainedModel, weights: Mapping[str, Weight], index: int) -> list[ModelBlock]:
    """Return the persistent buffers, which are in no block of the model, as one more block; [] without any."""
    parameters = dict(tree.named_parameters(remove_duplicate=False))
    entries = {
        name: entry for name, entry in weights.items() if isinstance(entry, TensorEntry) and name not in parameters
    }
    if not entries:
        return []
    layout = SlabLayout.pack((name, entry.dtype, entry.shape) for name, entry in entries.items())
    placed = zip(entries.values(), layout.tensors, strict=True)
    extents = tuple(extent for entry, tensor in placed for extent in find_extents(entry, tensor))
    return [ModelBlock(Block(index, "buffers", layout, extents), (), (), is_layer=False)]
