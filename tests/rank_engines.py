"""Engines that several ranks open, and what they compute beside one process alone."""

import signal
from pathlib import Path
from typing import Any

import torch
from checkpoints import random_prompts
from family_models import Tensors, outputs_of
from ranks_support import Failed, Ranks, run_ranks

import zinfer
from zinfer.errors import RankError
from zinfer.offload.stats import RunStats

Job = tuple[Path, dict[str, Any], Tensors]
"""A checkpoint, a configuration, and inputs; none: `inputs_of` each rank."""


def config(
    homes: str,
    bits: int | None = None,
    device: str = "cpu",
    most_device_bytes: int | None = None,
    nvme_path: Path | None = None,
) -> dict[str, Any]:
    """The most device memory decides whether layers on it are divided, or whole on each rank.

    Codes made while loading are in no file, so their home on disk is a file under ``nvme_path``.
    """
    options: dict[str, Any] = {"device": device}
    if most_device_bytes is not None or device == "cuda":  # which several ranks may share
        options["max_weight_memory"] = most_device_bytes or "4GB"
    if bits is not None:
        options["quantization"] = {"bits": bits, "group_size": 16} if bits == 4 else {"bits": bits}
    offload = {"device": homes} | ({} if nvme_path is None else {"nvme_path": str(nvme_path)})
    return {"zero_optimization": {"offload_param": offload}, "zinfer": options}


def inputs_of(rank: int, num_tokens: int = 7) -> Tensors:
    """Other inputs on each rank."""
    return {"input_ids": torch.tensor(random_prompts(1, min_tokens=num_tokens, max_tokens=num_tokens, seed=rank + 1))}


def computed(rank: int, jobs: list[Job], num_calls: tuple[int, ...]) -> list[tuple[Tensors, RunStats]]:
    """Outputs and stats of each job, one engine after the other, after a number of calls that differs by rank."""
    found = []
    for folder, settings, inputs in jobs:
        engine = zinfer.init_inference(folder, settings)
        try:
            given = inputs or inputs_of(rank)
            outputs: Tensors = {}
            for _ in range(num_calls[rank]):
                with torch.no_grad():
                    outputs = outputs_of(engine(**given))
            found.append(({name: tensor.cpu() for name, tensor in outputs.items()}, engine.stats()))
        finally:
            engine.destroy()
    return found


def check_equal(jobs: list[Job], size: int, num_calls: tuple[int, ...]) -> None:
    several = run_ranks(size, computed, jobs, num_calls)
    for rank, found in enumerate(several):
        alone = computed(rank, jobs, num_calls)
        for job, (outputs, _), (wanted, _) in zip(jobs, found, alone, strict=True):
            assert outputs.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(outputs[name], tensor), f"{job[0].name}, {job[1]}, rank {rank}: {name}"


def calling(rank: int, job: Job, begun: Path) -> str:
    """Calls until another rank fails, and returns what is said of it."""
    folder, settings, _ = job
    engine = zinfer.init_inference(folder, settings)
    while True:
        try:
            with torch.no_grad():
                engine(**inputs_of(rank))
            (begun / str(rank)).touch()
        except RankError as failure:
            engine.destroy()
            return str(failure)


def check_lost(job: Job, begun: Path, lost: int, number: signal.Signals) -> None:
    """One of two ranks gets a signal while both compute; the other one ends, and names it."""
    with Ranks(2, calling, job, begun) as ranks:
        ranks.wait_until(lambda: all((begun / str(rank)).exists() for rank in range(2)))
        ranks.kill(lost, number)
        said = ranks.results()[1 - lost] if number == signal.SIGKILL else ranks.result_of(1 - lost)
    assert not isinstance(said, Failed)
    assert f"rank {lost}" in said
