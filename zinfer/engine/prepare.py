"""A model before its blocks have homes: the module, its weight files, and its blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.engine.estimator import beside_weights
from zinfer.errors import ConfigError
from zinfer.inject.fusion_groups import FusionGroup, find_packs, packs_in
from zinfer.model.build import find_dtype, report_device, warn_of_overflow
from zinfer.model.matching import Weight, load_buffers, match_weights
from zinfer.model.outline import keeps_blocks
from zinfer.model.partition import ModelBlock, partition_model, warn_of_missing
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.stage import ShorterModel
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.reader import ReadObserver
from zinfer.nvme.scratch import ScratchFile
from zinfer.offload.partition import WHOLE, Partition
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.memory import Footprint, beside_request
from zinfer.planning.placement import Plan, make_plan
from zinfer.probe.limits import MachineLimits, choose_device
from zinfer.ranks.mesh import DIVIDING
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.store.caches import ModuleFile, module_file, stored_copy
from zinfer.store.source import LoadedWeights, check_alike, part_of
from zinfer.weights import Checkpoint
from zinfer.weights.block_parameter import SlabBlocks
from zinfer.weights.quantized import find_stored_scheme


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A module that is partitioned into blocks as its settings ask.

    Attributes:
        module: the module tree.
        settings: the resolved configuration.
        checkpoint: holds the weights; None for weights in memory.
        blocks: all blocks, in the model's order.
        weights: the place of each parameter and buffer in the checkpoint; empty for weights in memory.
        wanted_packs: layers that could share a matrix product, if kernels are to be injected.
        module_file: the file that weights from memory were written to, for blocks on disk.
        sharding: how the module was divided, if it holds one rank's shard of each layer.
        part: how the module was cut down, if it holds some of the layers.
        observe: returns what looks at the bytes that are read of a checkpoint, or of a packed copy of it.
    """

    module: PreTrainedModel
    settings: Settings
    checkpoint: Checkpoint | None
    blocks: tuple[ModelBlock, ...]
    weights: Mapping[str, Weight]
    wanted_packs: tuple[FusionGroup, ...]
    module_file: ModuleFile | None = None
    sharding: Sharding | None = None
    part: ShorterModel | None = None
    observe: Callable[[Checkpoint], ReadObserver] | None = None

    @classmethod
    def of(
        cls,
        module: PreTrainedModel,
        checkpoint: Checkpoint | None,
        settings: Settings,
        sharding: Sharding | None = None,
        part: ShorterModel | None = None,
    ) -> "PreparedModel":
        """Partition a module whose weights are in a checkpoint or in memory.

        Args:
            sharding: divides the module, which then has the rank's shapes.
            part: cuts the module down to some of its layers.

        Raises:
            CheckpointError: the checkpoint lacks weights of the module, or the module's layers cannot be found.
            ConfigError: a quantization rule matches no parameter, or a weight that cannot be quantized as asked.
        """
        if settings.quantization is not None:
            settings.quantization.check_patterns(name for name, _ in module.named_parameters(remove_duplicate=False))
        warn_of_missing(module, settings.leaves)
        scheme = find_stored_scheme(checkpoint) if checkpoint else None
        part_text = scheme.part if scheme else None
        is_part = part_text is not None
        if checkpoint is not None and part_text is not None:
            _check_part(checkpoint, part_text, sharding, settings)
        if is_part and sharding is not None:  # what is kept for a rank has its shapes
            sharding.apply(module)
        weights = match_weights(module, checkpoint, scheme) if checkpoint else {}
        checksums = scheme.checksums if scheme else {}
        if sharding is not None and not is_part:
            whole, weights = weights, sharding.cut_weights(weights)
            in_part = {each.file for name, each in whole.items() if weights.get(name) is not each}
            checksums = {file: each for file, each in checksums.items() if file not in in_part}  # of whole files
            sharding.apply(module)
        if part is not None:
            part.apply()
            weights = part.own(weights)
        return replace(cls._partition(module, checkpoint, weights, checksums, settings), sharding=sharding, part=part)

    def _over(self, copy: Checkpoint) -> "PreparedModel":
        """Return the model over another checkpoint, of the module's own shapes."""
        scheme = find_stored_scheme(copy)
        if self.part is not None:  # the copy is of all stages
            self.part.undo()
        weights = match_weights(self.module, copy, scheme)
        if self.part is not None:
            self.part.apply()
            weights = self.part.own(weights)
        made = self._partition(self.module, copy, weights, scheme.checksums if scheme else {}, self.settings)
        return replace(made, sharding=self.sharding, part=self.part, observe=self.observe)

    @classmethod
    def _partition(
        cls,
        module: PreTrainedModel,
        checkpoint: Checkpoint | None,
        weights: Mapping[str, Weight],
        checksums: Mapping[Path, str],
        settings: Settings,
    ) -> "PreparedModel":
        packs = tuple(find_packs(module)) if settings.kernel_inject else ()
        together = [names for pack in packs for names in pack.parameters]
        rules, classes = settings.quantization, settings.block_classes
        blocks = partition_model(
            module,
            weights,
            rules,
            checksums=checksums,
            together=together,
            classes=classes,
            leaves=settings.leaves,
            in_blocks=keeps_blocks(settings, on_cuda=choose_device(settings).type == "cuda"),
        )
        _decode_experts_alone(module, blocks)
        return cls(module, settings, checkpoint, tuple(blocks), weights, packs)

    def with_packed_copy(self) -> "PreparedModel":
        """Return the model over a packed copy whose files stream unchanged, if the settings name a folder for one.

        Raises:
            as `stored_copy` and `module_file`.
        """
        if self.checkpoint is None:
            file = module_file(self.blocks, self.settings)
            return self if file is None else replace(self, blocks=file.blocks, module_file=file)
        shard = self.sharding.shard if self.sharding else None
        copy = stored_copy(
            self.checkpoint, list(self.blocks), find_dtype(self.module), self.settings, shard, self.observer
        )
        return self._over(copy) if copy else self

    def packed_alike(self, ranks: ModelRanks | None) -> "PreparedModel":
        """As `with_packed_copy`; of several ranks one packs first, and all compare their models before and after.

        Raises:
            CheckpointError: ranks have different weights.
            RankError: another rank failed.
        """
        if ranks is None:
            return self.with_packed_copy()
        self._compare(ranks)
        packed = ranks.first_alone(self.with_packed_copy)
        if packed.checkpoint is not self.checkpoint:
            packed._compare(ranks)
        return packed

    def _compare(self, ranks: ModelRanks) -> None:
        check_alike(ranks.exchange(self.loaded), [ranks.name_of(rank) for rank in range(ranks.group.size)])

    @property
    def loaded(self) -> LoadedWeights | None:
        """The checkpoint or store that its blocks are read from, for comparison among ranks; None if there is none."""
        return LoadedWeights.of(self.checkpoint) if self.checkpoint else None

    def close(self) -> None:
        """Delete the file that was written for it, if any; may be called again."""
        if self.module_file is not None:
            self.module_file.scratch.close()

    def plan(
        self, limits: MachineLimits, free_bytes: int, reserve: Footprint | None, ranks: ModelRanks | None = None
    ) -> Plan:
        """Choose homes for the blocks.

        All ranks choose the same, within the smallest budgets of any. Those that divide layers do if the parts are
        shared by others: then for the largest part.

        Args:
            free_bytes: free device memory, whatever the cap of the limits.
            reserve: as for `beside_weights`.

        Raises:
            ConfigError: as `beside_weights`.
            PlanError: a budget is too small.
        """
        left = beside_request(limits, free_bytes, self.settings, self.beside_weights(reserve, limits))
        if ranks is None:
            return self._place(left)
        plan = self._place(left.least(ranks.exchange(left)), ranks.partition)
        if ranks.mesh.num_dividing == 1 or ranks.partition.size == 1:
            return plan
        sizes = [block.block.nbytes for block in self.blocks]
        found, alike = ranks.exchange((sizes, plan)), ranks.mesh.ranks_in(("zero", *DIVIDING), ranks.group.rank)
        return replace(_of_largest([found[rank] for rank in alike]), streamed_bytes=plan.streamed_bytes)

    def device_parts(
        self, limits: MachineLimits, free_bytes: int, reserve: Footprint | None, partition: Partition = WHOLE
    ) -> DeviceParts:
        """Return what takes the device's memory, as planned for this rank alone; arguments and errors as for `plan`."""
        taken = self.beside_weights(reserve, limits)
        plan = self._place(beside_request(limits, free_bytes, self.settings, taken), partition)
        return DeviceParts.of(plan, taken, limits, limits.within_cap(free_bytes))

    def beside_weights(self, reserve: Footprint | None, limits: MachineLimits) -> Footprint | None:
        """Return what is needed on the device beside the weights; as `zinfer.engine.estimator.beside_weights`."""
        return beside_weights(self.module, self.blocks, self.settings, reserve, on_cuda=limits.on_cuda)

    def _place(self, left: MachineLimits, partition: Partition = WHOLE) -> Plan:
        layers = [block.block.index for block in self.blocks if block.is_layer]
        return make_plan([block.block for block in self.blocks], layers, left, self.settings, partition)

    def take_to(self, device: torch.device) -> None:
        """Load the buffers that are in no block onto the device, and make the module report it as its device."""
        load_buffers(self.module, self.weights, device)
        report_device(self.module, device)
        warn_of_overflow(self.module, find_dtype(self.module))

    @property
    def files(self) -> Mapping[Path, FileIdentity]:
        """The files that weights are read from, with their identity when opened; empty for weights in memory."""
        if self.module_file is not None:
            return {self.module_file.scratch.path: self.module_file.identity}
        return self.checkpoint.files if self.checkpoint else {}

    @property
    def observer(self) -> ReadObserver | None:
        """What looks at the bytes that are read of these files; None: nothing does."""
        return self.observe(self.checkpoint) if self.observe and self.checkpoint else None

    @property
    def scratch(self) -> ScratchFile | None:
        """The file that is deleted with the engine, if one was written."""
        return self.module_file.scratch if self.module_file else None

    @property
    def packs(self) -> list[FusionGroup]:
        """The layers that can share a matrix product, because their weights are adjacent in the slab."""
        return packs_in(self.blocks, self.wanted_packs, self.module)


def _of_largest(found: Sequence[tuple[Sequence[int], Plan]]) -> Plan:
    """Return the plan of the ranks with the largest part of each block: all parts must stream the same blocks."""
    largest, plan = max(found, key=lambda each: sum(each[0]))
    assert all(own <= most for sizes, _ in found for own, most in zip(sizes, largest, strict=True)), "one has the most"
    return plan


def _check_part(checkpoint: Checkpoint, part: str, sharding: Sharding | None, settings: Settings) -> None:
    """Refuse what is kept for another rank, or was divided otherwise."""
    own = part_of(sharding.shard if sharding else None, settings)
    if part != own:
        raise ConfigError(
            f"{checkpoint.folder}: holds the part of each layer of rank {part}, and this one has "
            f"{own or 'whole layers'}; give the folder with ds_inference_config.json, with the same tensor_parallel "
            "section and as many ranks"
        )


def _decode_experts_alone(module: PreTrainedModel, blocks: Iterable[ModelBlock]) -> None:
    """Have experts that stay in blocks computed one after another: transformers' other ways take all their values."""
    tensors = (tensor for block in blocks for tensor in block.block.layout.tensors)
    if any(isinstance(tensor, SlabBlocks) and len(tensor.shape) == 3 for tensor in tensors):
        module.config.get_text_config()._experts_implementation = "eager"
