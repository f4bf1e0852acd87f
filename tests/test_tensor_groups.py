"""Ranks that divide layers in groups which the program has made itself."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import tiny_checkpoint, tiny_mixtral
from ranks_support import run_ranks
from test_tensor_parallel import IDS, config, error_of

import zinfer
from zinfer.config import resolve_settings
from zinfer.config.parallel import ExpertGroups
from zinfer.config.process_groups import GroupRanks
from zinfer.config.settings import Settings
from zinfer.engine.stated_groups import check_groups
from zinfer.errors import ConfigError
from zinfer.ranks.mesh import Mesh


class Unit:
    """What Megatron calls an mpu."""

    def __init__(self, size: int, rank: int, group: Any = None) -> None:
        self.size, self.rank, self.group = size, rank, group

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_group(self) -> Any:
        return self.group


def said(folder: Path, **kwargs: object) -> str:
    """The error that these keys give, or what they compute: ""."""
    try:
        zinfer.init_inference(folder, device="cpu", **kwargs).destroy()
        return ""
    except ConfigError as error:
        return str(error)


def grouped(rank: int, folder: Path) -> tuple[list[torch.Tensor], list[str]]:
    """Logits of ranks in two groups, stated in four ways, and what is said of other groups."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = [dist.new_group(each) for each in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair, crossed = groups[rank // 2], groups[2 + rank % 2]
    unit = Unit(2, rank % 2, pair)
    ways: list[dict[str, Any]] = [{"tp": {"tp_group": pair}}, {"mpu": unit}, {"tp": {"mpu": unit, "autotp_size": 2}}]
    logits = []
    for way in ways:
        engine = zinfer.init_inference(folder, device="cpu", **way)
        assert engine.module.config.num_attention_heads == 2
        logits.append(engine(IDS).logits.clone())
        engine.destroy()
    refused: list[dict[str, Any]] = [
        {"tp": {"tp_group": crossed}},
        {"tp": {"tp_group": pair, "tp_size": 4}},
        {"mpu": Unit(2, 1 - rank % 2, pair)},
        {"mpu": Unit(4, rank), "mp_size": 2},
        {"mpu": unit, "tp": {"tp_group": crossed}},
    ]
    return logits, [said(folder, **way) for way in refused]


def around_experts(rank: int, mixture: Path) -> tuple[list[tuple[torch.Tensor, int]], list[str]]:
    """Logits and loaded bytes of ranks that divide experts in groups of two, and what is said of other groups."""
    groups = [dist.new_group(each) for each in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair, crossed = groups[rank // 2], groups[2 + rank % 2]
    found = []
    ways: list[dict[str, Any]] = [{"moe": {"ep_group": pair}}, {"ep_group": {2: pair, 4: None}, "ep_mp_group": crossed}]
    for way in ways:
        engine = zinfer.init_inference(mixture, device="cpu", **way)
        found.append((engine(IDS).logits.clone(), engine.stats().loaded_bytes))
        engine.destroy()
    refused: list[dict[str, Any]] = [
        {"ep_group": crossed},
        {"ep_group": pair, "ep_size": 4},
        {"ep_size": 2, "expert_mp_group": pair},
        {"ep_group": {2: pair, 4: crossed}},
    ]
    return found, [said(mixture, **way) for way in refused]


def both(rank: int, folder: Path, mixture: Path) -> tuple[Any, Any]:
    return grouped(rank, folder), around_experts(rank, mixture)


def test_groups_that_the_program_made(tmp_path: Path) -> None:
    folder, mixture = tiny_checkpoint("llama", tmp_path / "llama", num_layers=2), tmp_path / "mixtral"
    tiny_mixtral().save_pretrained(mixture)
    alone = zinfer.init_inference(folder, config(1))
    wanted = alone(IDS).logits
    alone.destroy()
    engine = zinfer.init_inference(mixture, device="cpu")
    wanted_of_experts, whole_bytes = engine(IDS).logits.clone(), engine.stats().loaded_bytes
    engine.destroy()
    for rank, ((logits, errors), (experts, said_of_experts)) in enumerate(run_ranks(4, both, folder, mixture)):
        assert all(error_of({"logits": each}, {"logits": wanted}) <= 1e-5 for each in logits)
        own, crossed = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert f"has the ranks {crossed}, but rank {rank} divides layers with the ranks {own}: those of" in errors[0]
        assert "tp.tp_size = 4 (keyword arguments) contradicts tp.tp_group = " in errors[1]
        assert f"it says that this process, rank {rank}, is number {1 - rank % 2} of 2 there; " in errors[2]
        assert "mp_size = 2 (keyword arguments) contradicts mpu = " in errors[3]
        assert "the group has 4 ranks; keep one of the two keys" in errors[3]
        assert "mpu = " in errors[4]
        assert "both mean tensor_parallel.tp_group; keep one of them" in errors[4]
        for of_experts, loaded_bytes in experts:
            assert error_of({"logits": of_experts}, {"logits": wanted_of_experts}) <= 1e-5
            assert loaded_bytes < 0.6 * whole_bytes
        placed, size, alike, several = said_of_experts
        assert placed.startswith(
            f"moe.ep_group has the ranks {crossed}, but rank {rank} divides experts with the ranks"
        )
        assert "ep_size = 4 (keyword arguments) contradicts ep_group = " in size
        assert alike.startswith(
            f"moe.ep_mp_group has the ranks {own}, but the ranks {crossed} have the experts of rank"
        )
        assert "expected one process group, because all mixtures of a model are divided alike" in several


def test_groups_of_experts_beside_tensor_ranks_are_apart() -> None:
    """Ranks 0 and 1 divide each expert; 0 and 2 have different ones."""
    mesh, settings = Mesh(expert=2, tensor=2), resolve_settings()

    def told(*members: int) -> Settings:
        return replace(settings, expert_groups=ExpertGroups(GroupRanks(members), None))

    check_groups(mesh, 0, told(0, 2))
    said = r"moe.ep_group has the ranks \[0, 1\], but rank 0 divides experts with the ranks \[0, 2\]: .* are 2 apart"
    with pytest.raises(ConfigError, match=said):
        check_groups(mesh, 0, told(0, 1))


def test_groups_without_processes_are_refused() -> None:
    assert resolve_settings({"mpu": Unit(1, 0)}) == resolve_settings()
    for kwargs, message in (
        ({"mpu": Unit(2, 0)}, "mpu = .*: its group is one of torch.distributed, which this process has not joined; "),
        ({"mpu": object()}, "mpu = .*: expected an object with get_model_parallel_world_size, get_model_parallel_rank"),
        ({"tp": {"tp_group": "all"}}, 'tp.tp_group = "all": expected a process group of torch.distributed that this'),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_settings(kwargs)


def test_secondary_partitions_are_ranks_that_share_a_model() -> None:
    for size, wanted in ((0, None), (1, None), (2, 2)):
        assert resolve_settings({"zero": {"zero_hpz_partition_size": size}}).parallel.zero == wanted
    with pytest.raises(
        ConfigError, match=r"zero_hpz_partition_size = 2 .* contradicts zinfer.parallel.zero = 4 .* both"
    ):
        resolve_settings({"zero": {"zero_hpz_partition_size": 2}, "zinfer": {"parallel": {"zero": 4}}})


def test_sizes_of_training() -> None:
    assert resolve_settings({"tp": {"autotp_size": 0}, "training_mp_size": 1}) == resolve_settings()
    assert resolve_settings({"tp": {"autotp_size": 2, "tp_size": 2}}).parallel.tensor == 2
    with pytest.raises(ConfigError, match=r"tp.tp_size = 4 .* contradicts tp.autotp_size = 2 .* both mean"):
        resolve_settings({"tp": {"autotp_size": 2, "tp_size": 4}})
    with pytest.raises(ConfigError, match=r"training_mp_size = 4: says that as many ranks of training wrote .* join "):
        resolve_settings({"training_mp_size": 4})
