"""The outline of a model for planning: its blocks, widths and limits, from a checkpoint, from config.json, or stored.

[Note: stored outlines]
Outlines of published models are in known_outlines.json, so that a plan of one imports neither torch nor transformers,
which take several times as long as the plan. `zinfer.model.built_outline` derives them from the modules themselves;
after a change of known_models.json, of transformers or of how models are partitioned, write them again by
``python -m zinfer.model.built_outline``. `tests/test_stored_outlines.py` compares the two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from zinfer.config import Settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import ConfigError
from zinfer.model.known_models import KnownModel, find_known_model, known_config
from zinfer.model.spec import ModelSpec
from zinfer.offload.block import Block, Extent, SlabLayout, SlabTensor, named_dtype
from zinfer.requests.length_limits import LengthLimits, check_min_out_tokens
from zinfer.weights.hub import resolve_folder
from zinfer.weights.slab_matrix import SlabMatrix, quantized_form

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from zinfer.model.built_outline import BuiltModel
    from zinfer.model.stage import Stage

MADE_UP_NAME: Final = "model.safetensors"
# Where a file's weights would begin: past the header's length, and not aligned to pages, as in real files.
MADE_UP_OFFSET: Final = 8
STORED_NAME: Final = "known_outlines.json"


class PlannedBlock(Protocol):
    """A block, and what planning needs of the modules that use it: a `ModelBlock`, or one of a stored outline."""

    @property
    def block(self) -> Block:
        """The block."""

    @property
    def is_layer(self) -> bool:
        """Whether it is a transformer layer."""

    @property
    def num_uses(self) -> int:
        """Loads per pass: a tied embedding and head are one block used twice."""

    @property
    def is_looked_up(self) -> bool:
        """Whether all modules that use it are embeddings."""


class OutlinedModel(Protocol):
    """What an outline is made of: a `BuiltModel`, or a `StoredModel`."""

    @property
    def tree(self) -> PreTrainedModel:
        """The module tree, on the meta device."""

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters, tied ones too."""

    def blocks(self, quantization: Quantization | None) -> tuple[PlannedBlock, ...]:
        """Return the blocks. Raises ConfigError if groups do not divide the model's matrices."""

    def of_stage(self, stage: Stage, quantization: Quantization | None) -> tuple[tuple[PlannedBlock, ...], ModelSpec]:
        """Return the blocks and the spec of one stage of a pipeline."""


@dataclass(frozen=True)
class Outline:
    """The facts about a model that planning needs.

    Attributes:
        name: the folder, or the hub name as it was given.
        blocks: all blocks, in the model's order.
        spec: its widths.
        dtype: of weights, activations and cache; a `NamedDtype` in a stored outline.
        max_positions: number of positions; None without a limit.
        files: the checkpoint's; empty if the weights' layout is made up.
        model: makes the blocks anew.
    """

    name: str
    blocks: tuple[PlannedBlock, ...]
    spec: ModelSpec
    dtype: torch.dtype
    max_positions: int | None
    files: tuple[Path, ...]
    model: OutlinedModel = field(repr=False, compare=False)

    @property
    def tree(self) -> PreTrainedModel:
        """The module tree, which is built now if the outline was stored."""
        return self.model.tree

    def quantized(self, quantization: Quantization) -> Outline:
        """Return the outline with full-precision matrices stored quantized.

        Raises:
            ConfigError: groups do not divide its matrices.
        """
        return replace(self, blocks=self.model.blocks(quantization))

    def of_stage(self, stage: Stage, quantization: Quantization | None = None) -> Outline:
        """Return the outline of one stage of a pipeline, which is a shorter model.

        Raises:
            ConfigError: as `StageModel`; or as `quantized`.
        """
        blocks, spec = self.model.of_stage(stage, quantization)
        return replace(self, blocks=blocks, spec=spec)

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


def keeps_blocks(settings: Settings, *, on_cuda: bool) -> bool:
    """Return whether weights in GGUF's blocks stay so under these settings ([Note: blocks stay as stored])."""
    return settings.quantization is None and (on_cuda or settings.offload.device == "nvme")


def read_outline(
    model: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
    *,
    in_blocks: bool = False,
    asks_hub: bool = False,
) -> Outline:
    """Read the outline of a checkpoint, of a folder with config.json and no safetensors, or of a published model.

    Args:
        model: as `zinfer.init_inference` takes it, a folder with config.json alone, or a name that `find_known_model`
            knows.
        dtype: that the weights are cast to; None takes the checkpoint's own.
        quantization: which matrices are stored quantized; they are planned as if a store of them was on disk.
        in_blocks: whether weights in GGUF's blocks stay so, as `keeps_blocks` says.
        asks_hub: of a model on the hub whose weights are not on this machine, the headers are read there if config.json
            alone does not say which dtype each weight has.

    Raises:
        CheckpointError: config.json is missing, describes no model, states no dtype or asks for quantized weights
            that a run refuses; or the checkpoint is damaged.
        PlanError: the model is no decoder that generates, or keeps a state other than keys and values.
    """
    if (known := find_known_model(model)) is not None:
        known_config(known)
        stored = StoredModel(known)
        if dtype is None or str(dtype) == str(stored.dtype):
            return stored.outline(quantization)
        from zinfer.model.built_outline import known_outline

        return known_outline(known, dtype, quantization)
    from zinfer.model.built_outline import built_outline  # imports torch and transformers

    return built_outline(model, dtype, quantization, in_blocks=in_blocks, asks_hub=asks_hub)


def check_settings(outline: Outline, settings: Settings) -> None:
    """Refuse what a run refuses of a configuration because of the model.

    Raises:
        ConfigError, CheckpointError: as a run.
    """
    if settings.checkpoint is not None:
        raise ConfigError(f"checkpoint: the model is given as a folder ({outline.name}) already; remove one of the two")
    check_min_out_tokens(outline.max_positions, settings.min_out_tokens)
    if settings.block_classes or settings.num_experts is not None:
        from zinfer.model.partition import check_classes
        from zinfer.model.spec import check_num_experts

        check_classes(outline.tree, settings.block_classes)
        check_num_experts(outline.tree, settings.num_experts)
    if settings.quantization is not None:
        settings.quantization.check_patterns(outline.model.parameter_names)
    if settings.batching.draft_model is not None:
        resolve_folder(settings.batching.draft_model, download=settings.download)


@dataclass(frozen=True)
class StoredBlock:
    """A block of a stored outline; a `PlannedBlock`."""

    block: Block
    is_layer: bool
    num_uses: int
    is_looked_up: bool


@dataclass(frozen=True)
class StoredModel:
    """A published model, of whose parameters names, shapes and places in a made-up file are stored."""

    known: KnownModel

    @cached_property
    def _document(self) -> Mapping[str, Any]:
        stored, name = _stored_outlines(), self.known.name
        found: Mapping[str, Any] = stored.get(name) or stored[name.removesuffix(f"-{self.known.format}")]
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is published in; of most weights, if some have another."""
        return named_dtype(self._document["dtype"])

    def outline(self, quantization: Quantization | None = None) -> Outline:
        """Return the outline. Raises ConfigError as `blocks`."""
        return Outline(
            name=self.known.name,
            blocks=self.blocks(quantization),
            spec=ModelSpec.of_document(self._document["spec"]),
            dtype=self.dtype,
            max_positions=self._document["max_positions"],
            files=(),
            model=self,
        )

    @cached_property
    def _built(self) -> BuiltModel:
        from zinfer.model.built_outline import BuiltModel, known_outline

        model = known_outline(self.known).model
        assert isinstance(model, BuiltModel)
        return model

    @property
    def tree(self) -> PreTrainedModel:
        """The module tree, built when first asked for."""
        return self._built.tree

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters, tied ones too."""
        names = [
            f"{each.block.name}.{tensor.name}" if each.is_layer else tensor.name
            for each in self.blocks(None)
            for tensor in each.block.layout.tensors
        ]
        return [*names, *self._document["tied"]]

    def of_stage(self, stage: Stage, quantization: Quantization | None) -> tuple[tuple[PlannedBlock, ...], ModelSpec]:
        """Return the blocks and the spec of one stage of a pipeline. Raises ConfigError as `StageModel`."""
        return self._built.of_stage(stage, quantization)

    def blocks(self, quantization: Quantization | None) -> tuple[PlannedBlock, ...]:
        """Return the blocks. Raises ConfigError if groups do not divide the model's matrices."""
        return tuple(self._blocks(quantization))

    def _blocks(self, quantization: Quantization | None) -> Iterator[StoredBlock]:
        index = 0
        for entry in self._document["blocks"]:
            template, _, first = entry["name"].rpartition(".")
            for number in range(entry.get("count", 1)):
                name = f"{template}.{int(first) + number}" if "count" in entry else entry["name"]
                begin = entry["begin"] + number * entry.get("pitch", 0)
                block = self._block(index, name, begin, entry, quantization)
                yield StoredBlock(
                    block, entry.get("is_layer", False), entry["num_uses"], entry.get("is_looked_up", False)
                )
                index += 1

    def _block(
        self, index: int, name: str, begin: int, entry: Mapping[str, Any], quantization: Quantization | None
    ) -> Block:
        prefix = f"{name}." if entry.get("is_layer") else ""
        tensors, extents, offset = list[SlabTensor](), list[Extent](), begin
        plain = [SlabTensor(each[0], self._dtype_of(each), tuple(each[1])) for each in entry["tensors"]]
        for tensor, each in zip(plain, entry["tensors"], strict=True):
            more = each[2] if len(each) > 2 else {}
            named = replace(tensor, name=prefix + tensor.name)
            transposed = more.get("is_transposed", False)
            form = named if more.get("is_kept") else quantized_form(quantization, named, transposed=transposed)
            tensors.append(replace(form, name=tensor.name))
            offset += more.get("skipped", 0)
            extents.append(Extent(_FILE, offset, tensor.nbytes, tensor.dtype, 0, tensor.dtype))
            offset += tensor.nbytes
        layout = SlabLayout.place(tensors)
        if any(isinstance(tensor, SlabMatrix) for tensor in tensors):  # a packed store would hold it as it is
            raw = named_dtype("uint8")
            extents = [Extent(_FILE, MADE_UP_OFFSET, layout.nbytes, raw, 0, raw)]
        else:
            placed = zip(extents, layout.tensors, strict=True)
            extents = [replace(extent, slab_offset=tensor.offset) for extent, tensor in placed]
        return Block(index, name, layout, tuple(extents), encloses=entry.get("encloses", False))

    def _dtype_of(self, tensor: list[Any]) -> torch.dtype:
        return named_dtype(tensor[2]["dtype"]) if len(tensor) > 2 and "dtype" in tensor[2] else self.dtype


_FILE: Final = Path(MADE_UP_NAME)


@cache
def _stored_outlines() -> Mapping[str, Any]:
    stored: Mapping[str, Any] = json.loads((files("zinfer.model") / STORED_NAME).read_text())
    return stored
