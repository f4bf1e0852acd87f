"""Ranks with a GPU each: every mode computes what one process does, by copies between the GPUs and by NCCL."""

import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_mixtral
from rank_engines import Job, calling
from ranks_support import Failed, Ranks, run_ranks
from test_tensor_parallel import IDS, Found, check_alike, computed, texts

from zinfer.ranks.mesh import Mode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
MODES: tuple[Mode, ...] = ("zero", "tensor", "pipeline", "expert")
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
Texts = tuple[list[tuple[int, ...]], int]
by_nccl = patch("zinfer.ranks.model_ranks.can_copy", return_value=False)


def config(mode: Mode, size: int, homes: str = "cpu") -> dict[str, Any]:
    options = {"device": "cuda", "max_weight_memory": "4GB", "parallel": {mode: size}}
    return {"zero_optimization": {"offload_param": {"device": homes}}, "zinfer": options}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Mode, Path]:
    folder = tmp_path_factory.mktemp("gpus")
    llama = tiny_checkpoint("llama", folder / "llama", num_layers=6, tie=False)
    tiny_mixtral().save_pretrained(folder / "mixtral")
    return dict.fromkeys(MODES, llama) | {"expert": folder / "mixtral"}


def told(rank: int, cases: list[tuple[Path, dict[str, Any]]], with_nccl: bool) -> tuple[list[Found], list[Texts]]:
    """Outputs and greedy tokens of calls, and texts of continuous batches."""
    if with_nccl:
        by_nccl.start()
    return computed(rank, [(*case, INPUTS) for case in cases]), [texts(rank, *case) for case in cases]


@pytest.mark.parametrize("with_nccl", [False, True], ids=["copies", "nccl"])
def test_every_mode_computes_what_one_process_does(folders: dict[Mode, Path], with_nccl: bool) -> None:
    cases = [(mode, homes) for mode in MODES for homes in ("cpu", "none")]
    alone, wanted = told(0, [(folders[mode], config(mode, 1, homes)) for mode, homes in cases], False)
    several = run_ranks(2, told, [(folders[mode], config(mode, 2, homes)) for mode, homes in cases], with_nccl)
    check_alike([found for found, _ in several], alone, [f"{mode} {homes}" for mode, homes in cases], 1e-4)
    for place, (mode, homes) in enumerate(cases):
        if mode == "zero":
            assert torch.equal(several[0][0][place][0]["logits"], alone[place][0]["logits"]), "the same bits"
        whole_bytes = alone[place][2].loaded_bytes
        for found, own in several:
            assert own[place][0] == wanted[place][0], (mode, homes)
            assert found[place][2].loaded_bytes < 0.8 * whole_bytes, (mode, homes)


def over_nccl(rank: int, job: Job, begun: Path) -> str:
    by_nccl.start()
    return calling(rank, job, begun)


def test_a_killed_rank_ends_another_that_waits_in_nccl(folders: dict[Mode, Path], tmp_path: Path) -> None:
    job = (folders["zero"], config("zero", 2, "nvme"), {})
    with Ranks(2, over_nccl, job, tmp_path) as ranks:
        ranks.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        ranks.kill(1, signal.SIGKILL)
        said = ranks.result_of(0)
    assert not isinstance(said, Failed)
    assert "rank 1" in said
