"""`Division`: what a rank holds of a model that several compute: a shard of each layer, or a stage's layers."""

from collections.abc import Callable
from contextlib import ExitStack

from transformers import PreTrainedModel

from zinfer.checkpoint import Checkpoint
from zinfer.config import Settings
from zinfer.engine.prepare import PreparedModel
from zinfer.engine.shard_hooks import ShardHooks, find_shard
from zinfer.engine.stage_hooks import StageHooks, find_stage
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.stage import StageModel
from zinfer.model.weight_matching import find_stored
from zinfer.ranks.group import RankGroup
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.stage_exchange import StageExchange

Prepare = Callable[[PreTrainedModel, Checkpoint | None, Settings, Sharding | None], PreparedModel]


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
        self.stages: StageHooks | None = None

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange outputs within a forward."""
        return self._shard is not None or self._stage is not None

    def prepare(
        self,
        module: PreTrainedModel,
        checkpoint: Checkpoint | None,
        settings: Settings,
        partition: Prepare,
    ) -> PreparedModel:
        """Partition this rank's part of a module.

        Args:
            partition: partitions a module, or its shards; of stages, that of the checkpoint.

        Raises:
            ConfigError: the model cannot be divided as the configuration asks.
            CheckpointError: as `PreparedModel.of`.
        """
        if self._stage is not None:
            part = StageModel(module, self._stage, settings.block_classes)
            self._ends.append(part.undo)
            return PreparedModel.of(module, checkpoint, settings, part=part)
        sharding: Sharding | None = None
        if self._shard is not None:
            stored = find_stored(module, checkpoint) if checkpoint else {}
            classes, rules = settings.block_classes, settings.quantization
            sharding = Sharding.of(module, self._shard, classes, rules, stored, settings.tensor_parallel)
            self._ends.append(sharding.undo)
        return partition(module, checkpoint, settings, sharding)

    def connect(self, module: PreTrainedModel, prepared: PreparedModel) -> None:
        """Let the part exchange with those of the other ranks, before anything else hooks into the module."""
        if self._ranks is not None and prepared.sharding is not None:
            self._ends.append(ShardHooks(module, prepared.sharding, self._ranks).remove)
        if self._exchange is not None and prepared.part is not None:
            self.stages = StageHooks(module, prepared.part, self._exchange)
            self._ends.append(self.stages.remove)

    def remove(self) -> None:
        """Disconnect the part, and give the module its former shape; may be called again.

        Raises:
            RankError: another rank failed before all hidden states had arrived.
        """
        with ExitStack() as owned:
            while self._ends:
                owned.callback(self._ends.pop(0))
