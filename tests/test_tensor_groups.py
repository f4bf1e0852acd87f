"""Ranks that divide layers in groups which the program has made itself."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import tiny_checkpoint
from ranks_support import run_ranks
from test_tensor_parallel import IDS, config, error_of

import zinfer
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError


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


def test_groups_that_the_program_made(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path, num_layers=2)
    alone = zinfer.init_inference(folder, config(1))
    wanted = alone(IDS).logits
    alone.destroy()
    for rank, (logits, errors) in enumerate(run_ranks(4, grouped, folder)):
        assert all(error_of({"logits": each}, {"logits": wanted}) <= 1e-5 for each in logits)
        own, crossed = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert f"has the ranks {crossed}, but rank {rank} divides layers with the ranks {own}: those of" in errors[0]
        assert "tp.tp_size = 4 (keyword arguments) contradicts tp.tp_group = " in errors[1]
        assert f"it says that this process, rank {rank}, is number {1 - rank % 2} of 2 there; " in errors[2]
        assert "mp_size = 2 (keyword arguments) contradicts mpu = " in errors[3]
        assert "the group has 4 ranks; keep one of the two keys" in errors[3]
        assert "mpu = " in errors[4]
        assert "both mean tensor_parallel.tp_group; keep one of them" in errors[4]


def test_groups_without_processes_are_refused() -> None:
    assert resolve_settings({"mpu": Unit(1, 0)}) == resolve_settings()
    for kwargs, message in (
        ({"mpu": Unit(2, 0)}, "mpu = .*: its group is one of torch.distributed, which this process has not joined; "),
        ({"mpu": object()}, "mpu = .*: expected an object with get_model_parallel_world_size, get_model_parallel_rank"),
        ({"tp": {"tp_group": "all"}}, 'tp.tp_group = "all": expected a process group of torch.distributed that this'),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_settings(kwargs)


def test_sizes_of_training() -> None:
    assert resolve_settings({"tp": {"autotp_size": 0}, "training_mp_size": 1}) == resolve_settings()
    assert resolve_settings({"tp": {"autotp_size": 2, "tp_size": 2}}).parallel.tensor == 2
    with pytest.raises(ConfigError, match=r"tp.tp_size = 4 .* contradicts tp.autotp_size = 2 .* both mean"):
        resolve_settings({"tp": {"autotp_size": 2, "tp_size": 4}})
    with pytest.raises(ConfigError, match=r"training_mp_size = 4: says that as many ranks of training wrote .* join "):
        resolve_settings({"training_mp_size": 4})
