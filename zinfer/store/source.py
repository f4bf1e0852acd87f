"""The checkpoint that a store is made from, partitioned into the store's blocks; and what ranks compare of theirs.

Each host may have a copy of the model, and a store made of it, of its own. Ranks that gathered ranges of different
weights, or divided different ones, would compute nonsense without an error.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.build import build_meta_model
from zinfer.model.matching import Weight, match_weights
from zinfer.model.partition import ModelBlock, find_extents, partition_model
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.grain import Grain
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.text_side import has_sides
from zinfer.offload.block import Block, SlabLayout
from zinfer.store.files import BlockFile, name_prefix
from zinfer.weights import Checkpoint, TensorEntry
from zinfer.weights.checkpoint import weights_sample
from zinfer.weights.folder import absolute
from zinfer.weights.formats.gguf import EncodedTensor
from zinfer.weights.native import MANIFEST_NAME, Manifest, StoredParameter
from zinfer.weights.quantized import Squares, StoredMatrix, find_stored_scheme
from zinfer.weights.slab_matrix import SlabMatrix


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
        checkpoint: the files and tensors.
        rules: which weights to quantize.
        dtype: that products are computed in, and full-precision weights are stored in.
        files: of the store, one per block.
        parameters: the quantized parameters of the store.
        num_taken_over: number of them that keep the format in which the source holds them.
        text: the config of the text side, if that is stored of a multimodal model; None: the source's own.
    """

    checkpoint: Checkpoint
    rules: Quantization
    dtype: torch.dtype
    files: tuple[BlockFile, ...]
    parameters: Mapping[str, StoredParameter]
    num_taken_over: int
    text: Mapping[str, Any] | None = None

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
        tree = build_meta_model(checkpoint, settings.dtype, is_whole=settings.is_whole)
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
        is_decoded = any(isinstance(weight, EncodedTensor) for weight in weights.values())
        if not parameters and not is_decoded and shard is None:
            raise ConfigError(
                f"{checkpoint.folder}: these settings quantize no weight of this model; correct include and exclude"
            )
        num_taken_over = sum(
            isinstance(weight, StoredMatrix)
            and (not weight.encoding.is_native or (name in parameters and parameters[name].format == weight.format))
            for name, weight in weights.items()
        )
        files = tuple(BlockFile.of(block, len(blocks)) for block in blocks)
        text = None if side_of(checkpoint, settings) is None else tree.config.to_dict()
        return cls(checkpoint, rules, tree.config.dtype, files, parameters, num_taken_over, text)


def side_of(checkpoint: Checkpoint, settings: Settings) -> str | None:
    """Return the side of a multimodal model that is built of it; None: all that the model has."""
    return None if settings.is_whole or not has_sides(checkpoint) else "text"


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


_PART = "shard"


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of one rank.

    Attributes:
        folder: of the checkpoint or store.
        source: identifies the original's files; of a store, those that it was made of.
        settings: of a store: how its weights were converted. None for an original.
        part: of a store: which rank's part of each layer it has; None for whole layers.
        checksums: of a store's blocks, by the names of their files.
    """

    folder: str
    source: Mapping[str, str]
    settings: Mapping[str, Any] | None = None
    part: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "LoadedWeights":
        """Describe a checkpoint or store; reads samples of an original's weights.

        Raises:
            CheckpointError, OSError: a file cannot be read.
        """
        folder = f"{checkpoint.folder}"
        if checkpoint.is_listed or not (checkpoint.folder / MANIFEST_NAME).is_file():
            source = {"fingerprint": checkpoint.fingerprint, "weights_sample": weights_sample(tuple(checkpoint.files))}
            return cls(folder, source)
        manifest = Manifest.read(checkpoint.folder)
        identity, checksums = manifest.identity, {file: each.checksum for file, each in manifest.blocks.items()}
        source = {name: identity.source[name] for name in ("fingerprint", "weights_sample")}
        settings = {name: value for name, value in identity.settings.items() if name != _PART}
        return cls(folder, source, settings, identity.settings.get(_PART), checksums)

    def differences(self, other: "LoadedWeights") -> Iterator[str]:
        """Yield what is different about another rank's; of two parts the blocks differ anyway."""
        if (self.settings is None) != (other.settings is None):
            yield "one is a store and the other is not"
            return
        if self.source["fingerprint"] != other.source["fingerprint"]:
            yield "config.json, or names, sizes or headers of weight files"
        elif self.source != other.source:
            yield "the weights"
        if self.settings != other.settings:
            yield "how weights were converted"
        if self.part == other.part:
            names = {*self.checksums.items()} ^ {*other.checksums.items()}
            if names:
                yield f"the bytes of {min(names)[0]}"


def check_alike(several: Sequence[LoadedWeights | None], names: Sequence[str]) -> None:
    """Compare what ranks have loaded, by rank.

    Args:
        several: of each rank; None for weights that are in no file, which are not compared.
        names: of the ranks, for messages.

    Raises:
        CheckpointError: a rank has other weights than the first one; names both folders, and what differs.
    """
    known = [(each, name) for each, name in zip(several, names, strict=True) if each is not None]
    for place, (own, name) in enumerate(known):
        # The first with the same part, whose blocks must be the same; and the first of all.
        alike = next(each for each in known if each[0].part == own.part)
        for other, other_name in (known[0], alike) if place else ():
            if found := [*other.differences(own)]:
                raise CheckpointError(
                    f"{name} has loaded {own.folder}, and {other_name} {other.folder}, which differ in "
                    f"{', '.join(found)}: give all ranks copies of the same model; of stores under "
                    "zero_optimization.offload_param.nvme_path remove the wrong one, and the next start writes it again"
                )
