"""`init_distributed` and `zinfer.comm` under DeepSpeed's names."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from rank_engines import config, inputs_of
from ranks_support import run_ranks

import zinfer as deepspeed
from zinfer.errors import ConfigError

MPI = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def logits(folder: Path) -> torch.Tensor:
    engine = deepspeed.init_inference(str(folder), config("cpu"))
    with torch.no_grad():
        found: torch.Tensor = engine(**inputs_of(0)).logits.clone()
    assert (engine.stats().gathered_bytes > 0) == deepspeed.comm.is_initialized(), "the ranks did not share the model"
    engine.destroy()
    return found


def script(rank: int, folder: Path, by_mpi: bool) -> tuple[torch.Tensor, list[float], list[object]]:
    """A script of several processes, as DeepSpeed's launcher or MPI starts it."""
    for name, other in MPI.items() if by_mpi else ():
        os.environ[other] = os.environ.pop(name)
    from zinfer import comm as dist

    assert not dist.is_initialized()
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(minutes=3))
    deepspeed.init_distributed()  # again, as libraries do
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (rank, 2, rank)
    assert int(os.environ["LOCAL_RANK"]) == rank
    from torch.distributed.distributed_c10d import _get_default_group

    assert _get_default_group()._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=3)
    found = logits(folder)
    value, summed = torch.tensor([float(rank + 5)]), torch.tensor([float(rank + 1)])
    dist.broadcast(value, 0)
    dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    dist.inference_all_reduce(summed)
    names: list[object] = [None, None]
    dist.all_gather_object(names, f"rank {rank}")
    dist.barrier()
    dist.destroy_process_group()
    return found, [value.item(), summed.item()], names


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by_mpi", [False, True])
def test_a_script_of_two_processes(llama: Path, by_mpi: bool) -> None:
    expected = logits(llama)
    for found, numbers, names in run_ranks(2, script, llama, by_mpi):
        assert torch.equal(found, expected)
        assert numbers == [5.0, 6.0]
        assert names == ["rank 0", "rank 1"]


def test_a_process_alone_is_a_group_of_one() -> None:
    deepspeed.init_distributed("gloo")
    try:
        assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()) == (
            0,
            1,
            0,
        )
        deepspeed.comm.barrier()
    finally:
        deepspeed.comm.destroy_process_group()


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for keywords, words in (
        ({"dist_backend": "mpi"}, "dist_backend is 'mpi'; give one of nccl, gloo"),
        ({"init_method": "tcp://a:1"}, "init_method is 'tcp://a:1'; leave it out, and set MASTER_ADDR"),
        ({"dist_init_required": False}, "the processes are not connected"),
        ({"world_size": 2}, "world_size is 2, but 1 by the environment"),
        ({"rank": 1}, "rank is 1, but 0 by the environment"),
    ):
        with pytest.raises(ConfigError, match=words):
            deepspeed.init_distributed(**keywords)  # type: ignore[arg-type]
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="DEEPSPEED_TIMEOUT is 'soon', not a number of minutes"):
        deepspeed.init_distributed()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set, which 4 processes need to find each other"):
        deepspeed.init_distributed()
