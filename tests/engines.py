"""Engines for tests, whose memory budgets force blocks into chosen homes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import zinfer
from zinfer.model.build import build_meta_model
from zinfer.model.matching import match_weights
from zinfer.model.partition import partition_model
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import Block
from zinfer.offload.chunks import covered_bytes
from zinfer.offload.stats import RunStats
from zinfer.weights import Checkpoint

HOMES = ("resident", "host", "disk", "mixed")


def check_shares(stats: RunStats | None) -> None:
    """Above its ceiling, a share or the ceiling is wrong; as `MOST_SHARE` of the benchmarks."""
    for name in ("link_share", "disk_share"):
        share = getattr(stats, name, None)
        assert share is None or 0 <= share <= 1.05, f"{name} is {share}"


def blocks_of(folder: Path) -> list[Block]:
    """Those of a folder that has not changed are found once."""
    found = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return list(_blocks_of(folder, tuple(found)))


@cache
def _blocks_of(folder: Path, found: object) -> list[Block]:
    checkpoint = Checkpoint.open(folder)
    model = build_meta_model(checkpoint)
    return [block.block for block in partition_model(model, match_weights(model, checkpoint))]


def config_for(folder: Path, homes: str, num_slots: int, device: str) -> dict[str, object]:
    """A configuration whose budgets leave no other placement than ``homes`` for all blocks, embeddings included."""
    blocks = blocks_of(folder)
    largest = max(block.nbytes for block in blocks)
    staging = max(covered_bytes(block.extents) for block in blocks)
    budgets: dict[str, object] = {"device": device, "num_slots": num_slots}
    offload = {"resident": "none", "host": "cpu", "disk": "nvme", "mixed": "none"}[homes]
    if homes != "resident":
        always = sum(block.nbytes for block in blocks if block.encloses)
        budgets["max_weight_memory"] = num_slots * largest + always
    if homes == "mixed":
        small = sum(block.nbytes for block in blocks if block.nbytes < largest / 2)
        budgets["max_weight_memory"] = num_slots * largest + small
        budgets["max_host_memory"] = 2 * max(staging, align_up(largest)) + align_up(largest)
    return {"zero_optimization": {"offload_param": {"device": offload}}, "zinfer": budgets}


@contextmanager
def engine_for(
    folder: Path, homes: str, num_slots: int = 2, device: str = "cpu", **extra: object
) -> Iterator[zinfer.InferenceEngine]:
    engine = zinfer.init_inference(folder, config_for(folder, homes, num_slots, device), **extra)
    try:
        yield engine
    finally:
        engine.destroy()


def moved(engine: zinfer.InferenceEngine) -> tuple[int, int]:
    """Bytes copied to the device and read from the disk, with those on their way, of an engine that streams."""
    assert engine._runtime is not None
    assert engine._runtime._streamer is not None
    for use in engine._runtime._streamer._moving.values():
        use.transfer.wait()
    stats = engine.stats()
    return stats.bytes_to_device, stats.bytes_read_disk


@contextmanager
def loaded(model: Any, config: Any = None, **kwargs: Any) -> Iterator[zinfer.InferenceEngine]:
    """An engine on the CPU over whatever `init_inference` takes."""
    engine = zinfer.init_inference(model, config, device="cpu", **kwargs)
    try:
        yield engine
    finally:
        engine.destroy()


def drop_page_cache(folder: Path) -> None:
    """Write the folder's files out and take them off the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def distinct_tokens(tokens: torch.Tensor) -> int:
    """Fewest distinct tokens of any row [rows, tokens]: 1 would make equality say nothing."""
    return min(len(set(row.tolist())) for row in tokens)
