"""Settings of ranks: how many share what, and in which groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zinfer.config import values
from zinfer.config.key import setting
from zinfer.config.partition_specs import PartitionSpecs, partition_specs
from zinfer.config.process_groups import GroupRanks, expert_group, process_group
from zinfer.config.values import count


@dataclass(frozen=True)
class Parallel:
    """Sizes of the modes in which ranks share a job; missing ones are 1. None for all: zinfer chooses."""

    replicas: int | None = setting(
        "zinfer.parallel.replicas", count(1), "groups of ranks that each have a whole model and their own rows"
    )
    pipeline: int | None = setting(
        "zinfer.parallel.pipeline", count(1), "stages: ranks that each compute a contiguous part of the layers"
    )
    zero: int | None = setting(
        "zinfer.parallel.zero", count(1), "ranks that share one model: each has its range of every layer's bytes"
    )
    expert: int | None = setting(
        "zinfer.parallel.expert", count(1), "ranks that each have some of a mixture's experts, and divide the rest"
    )
    tensor: int | None = setting(
        "zinfer.parallel.tensor", count(1), "ranks that divide each layer, compute a part each and sum outputs"
    )


@dataclass(frozen=True)
class TensorParallel:
    """How layers are divided, beside the number of ranks. None: as zinfer chooses."""

    group: GroupRanks | None = setting(
        "tensor_parallel.tp_group",
        process_group,
        "torch's process group of the ranks that divide layers; its size is tp_size, its ranks follow one another",
    )
    specs: PartitionSpecs | None = setting(
        "tensor_parallel.partition_config",
        partition_specs,
        "which linear layers are divided by outputs (column) or inputs (row), or not at all (skip): the plan of a "
        "family without one; with that of another it must agree",
    )
    preset: str | None = setting(
        "tensor_parallel.preset_model",
        values.text,
        "the family whose plan divides the layers, for a family without one",
    )


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of ranks around the experts of mixtures that a program has made itself."""

    dividing: GroupRanks | None = setting(
        "moe.ep_group",
        expert_group,
        "torch's process group of the ranks that divide experts; its size is ep_size, its ranks follow one another",
        "expert_group",
    )
    alike: GroupRanks | None = setting(
        "moe.ep_mp_group",
        expert_group,
        "torch's process group of the ranks that have the same experts, one of each ep_group",
        "expert_mp_group",
    )


ANY_MESH: Final = Parallel()
ANY_DIVISION: Final = TensorParallel()
NO_GROUPS: Final = ExpertGroups()
