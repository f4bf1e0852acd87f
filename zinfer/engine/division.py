"""`Division`: what a rank holds of a model that several compute: a shard of each layer, or of a stage's layers."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.engine.prepare import PreparedModel
from zinfer.engine.shard_hooks import ShardHooks, find_shard
from zinfer.engine.stage_hooks import StageHooks, find_stage
from zinfer.errors import ConfigError
from zinfer.model.build import find_dtype
from zinfer.model.families import check_stages
from zinfer.model.matching import match_weights
from zinfer.model.sharding.grain import Grain
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.stage import ShorterModel, StageModel
from zinfer.ranks.group import RankGroup
from zinfer.ranks.mesh import DIVIDING, Mesh
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.stage_exchange import StageExchange
from zinfer.store.saved_parts import KEY, SavedPart, find_part, list_parts, save_part, written_module
from zinfer.weights import Checkpoint
from zinfer.weights.parameter import QuantizedParameter
from zinfer.weights.quantized import find_stored_scheme

Prepare = Callable[[PreTrainedModel, Checkpoint | None, Settings, Sharding | None, ShorterModel | None], PreparedModel]


class Division:
    """Gives a rank its part and connects it with the others, until `remove`; made on all ranks in the same order.

    Args:
        mesh: how the ranks are arranged.
        group: the processes; None for one that runs alone.
        ranks: all ranks of the job.

    Attributes:
        stages: connects this rank's stage of a pipeline, after `connect`; None without one.
    """

    def __init__(self, mesh: Mesh, group: RankGroup | None, ranks: ModelRanks | None) -> None:
        self._shard, self._stage = find_shard(mesh, group), find_stage(mesh, group)
        self._ranks = ranks
        self._exchange = StageExchange(ranks) if ranks is not None and self._stage is not None else None
        self._ends: list[Callable[[], None]] = []
        self._part: SavedPart | None = None
        self.stages: StageHooks | None = None

    def find_part(self, model: object, settings: Settings) -> Checkpoint | None:
        """Return what an earlier start has kept for this rank, if the model is given as such parts.

        Raises:
            ConfigError, CheckpointError: as `zinfer.store.saved_parts.find_part`; or nothing can be kept as asked.
        """
        if settings.save_parts is not None and self._shard is None:
            raise ConfigError(
                f"{KEY} keeps the parts of ranks that divide layers, and these do not; state tensor_parallel.tp_size, "
                "or remove the key: a whole model needs no other copy"
            )
        self._part = find_part(model, settings, self._shard)
        if self._part is not None and settings.save_parts is not None:
            raise ConfigError(f"{KEY}: the model is given as such parts already; remove the key")
        return self._part.checkpoint if self._part else None

    def save(self, prepared: PreparedModel) -> None:
        """Keep all ranks' parts for later starts, if the settings name a folder for them; all ranks call it together.

        Weights in memory are kept by `prepare`, while they are whole.

        Raises:
            ConfigError, CheckpointError, PlanError, OSError: as `save_part`.
            RankError: another rank failed.
        """
        if prepared.checkpoint is not None and prepared.sharding is not None:
            self._save(prepared.checkpoint, prepared.settings, find_dtype(prepared.module), prepared.sharding)

    def _save(self, checkpoint: Checkpoint, settings: Settings, dtype: torch.dtype, sharding: Sharding) -> None:
        folder, ranks = settings.save_parts, self._ranks
        if folder is None or ranks is None:
            return
        ranks.first_alone(lambda: save_part(checkpoint, settings, dtype, sharding.shard, sharding.grain))
        ranks.exchange(True)
        if ranks.group.rank == 0:
            list_parts(folder, sharding.shard)

    def _save_module(self, module: PreTrainedModel, settings: Settings, sharding: Sharding) -> None:
        """Keep the parts of a module with its weights in memory; one rank of each host writes it whole for the time."""
        folder, ranks = settings.save_parts, self._ranks
        if folder is None or ranks is None:
            return
        if any(isinstance(each, QuantizedParameter) for each in module.parameters()):
            raise ConfigError(
                f"{KEY}: the module is quantized in memory, and parts are made of its full weights; give it as it was "
                "before, and zinfer.quantization in the configuration"
            )
        with ExitStack() as owned:
            path = None
            if ranks.group.local_rank == 0:
                path = owned.enter_context(written_module(module, folder))
            paths = ranks.exchange(path)
            own = next(each for each in reversed(paths[: ranks.group.rank + 1]) if each is not None)  # of this host
            try:
                self._save(Checkpoint.open(own), settings, find_dtype(module), sharding)
            except Exception:
                ranks.exchange(False)  # the others still read the whole model, which is deleted next
                raise
            ranks.exchange(True)

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange outputs within a forward."""
        return self._shard is not None or self._stage is not None

    def can_capture(self) -> bool:
        """Return whether what is exchanged within a forward, if anything, can be captured in CUDA graphs.

        Stages and experts wait on the host for what others send. All ranks call it together.
        """
        if self._shard is None or self._ranks is None:
            return not self.exchanges
        return self._ranks.communicator(DIVIDING).can_capture and self._stage is None and self._shard.experts == 1

    def prepare(
        self,
        module: PreTrainedModel,
        checkpoint: Checkpoint | None,
        settings: Settings,
        partition: Prepare,
    ) -> PreparedModel:
        """Partition this rank's part of a module. The whole module is divided, and cut down to the stage's layers then.

        Args:
            partition: partitions a module, its shards, or a stage's layers.

        Raises:
            ConfigError: the model cannot be divided as the configuration asks.
            CheckpointError: as `PreparedModel.of`.
            PlanError, OSError, RankError: as `save`, for weights in memory.
        """
        part, sharding, classes = None, None, settings.block_classes
        if self._stage is not None:  # of whole layers, whose sizes are the same on all ranks
            check_stages(module)
            part = StageModel(module, self._stage, classes)
        if self._shard is not None:
            grain = self._part.grain if self._part else _find_grain(module, checkpoint, settings)
            sharding = Sharding.of(module, self._shard, classes, grain, settings.tensor_parallel)
            if checkpoint is None:
                self._save_module(module, settings, sharding)
        self._ends += [each.undo for each in (sharding, part) if each is not None]
        return partition(module, checkpoint, settings, sharding, part)

    def connect(self, module: PreTrainedModel, prepared: PreparedModel) -> None:
        """Let the part exchange with those of the other ranks, before anything else hooks into the module."""
        if self._ranks is not None and prepared.sharding is not None:
            self._ends.append(ShardHooks(module, prepared.sharding, self._ranks).remove)
        if self._exchange is not None and isinstance(prepared.part, StageModel):
            self.stages = StageHooks(module, prepared.part, self._exchange)
            self._ends.append(self.stages.remove)

    def connect_outputs(self, serve: Callable[[], bool] | None) -> None:
        """Let stages give their outputs to others, after all else has hooked into the module.

        Args:
            serve: as for `StageHooks.connect_outputs`.
        """
        if self.stages is not None:
            self.stages.connect_outputs(serve)

    def remove(self) -> None:
        """Disconnect the part, and give the module its former shape; may be called again.

        Raises:
            RankError: another rank failed before all hidden states had arrived.
        """
        with ExitStack() as owned:
            while self._ends:
                owned.callback(self._ends.pop(0))


def _find_grain(module: PreTrainedModel, checkpoint: Checkpoint | None, settings: Settings) -> Grain:
    scheme = find_stored_scheme(checkpoint) if checkpoint else None
    weights = match_weights(module, checkpoint, scheme) if checkpoint and scheme else {}
    return Grain.of(settings.quantization, weights)
