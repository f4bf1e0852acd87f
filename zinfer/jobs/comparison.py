"""Runs rivals on a random checkpoint of a bench's shape, for the ratio of their tokens/s to zinfer's."""

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from zinfer.engine.random_weights import random_bytes
from zinfer.errors import PlanError
from zinfer.jobs.limited_process import STOPPED, run_limited
from zinfer.jobs.rivals import RIVALS, Task, is_installed
from zinfer.probe.cgroups import free_host_bytes
from zinfer.units import human_bytes
from zinfer.weights import Checkpoint, TensorEntry
from zinfer.weights.folder import CONFIG_NAME, SAFETENSORS_INDEX_SUFFIX

LIMIT_S: Final = 3600.0
MOST_ROWS: Final = {"cpu": 32, "cuda": 256}
"""Prompts that a rival gets at once on each device; on a GPU half as many, and so on, where they do not fit."""
_OUT_OF_MEMORY: Final = "OutOfMemoryError"
_SHARD_BYTES: Final = 2 << 30
_SPARE_SHARE: Final = 0.05  # of the disk's free bytes


@dataclass(frozen=True)
class Compared:
    """What one rival did.

    Attributes:
        tokens_per_s: new tokens per second after loading; 0 if it failed.
        ratio: zinfer's tokens per second over the rival's; 0 if it failed.
        start_s: seconds of loading.
        batch_size: prompts that each of its processes had at once.
        num_done: prompts that it completed: fewer than all if it was stopped at its limit.
        failure: why there are no figures; empty if there are.
    """

    rival: str
    tokens_per_s: float = 0.0
    ratio: float = 0.0
    start_s: float = 0.0
    batch_size: int = 0
    num_done: int = 0
    failure: str = ""


def compare(
    rivals: Sequence[str],
    task: Task,
    outline: Checkpoint,
    tokens_per_s: float,
    limit_s: float = LIMIT_S,
) -> list[Compared]:
    """Run each installed rival on one random checkpoint, which is removed at the end.

    Args:
        rivals: keys of `zinfer.jobs.rivals.RIVALS`.
        task: prompts and device; rival, folders and result are filled in here. Its scratch is where all is written.
        outline: names, shapes and dtypes of the tensors to write; its folder holds config.json.
        tokens_per_s: zinfer's.
        limit_s: seconds that a rival may take.

    Raises:
        PlanError: the checkpoint does not fit the disk, or host memory.
        OSError: the disk failed.
    """
    absent = [name for name in rivals if not is_installed(name)]
    found = {name: Compared(name, failure="not installed") for name in absent}
    if len(absent) < len(rivals):
        with _checkpoint(outline, Path(task.scratch)) as checkpoint:
            for name in rivals:
                if name not in absent:
                    found[name] = _run(name, task, checkpoint, tokens_per_s, limit_s)
    return [found[name] for name in rivals]


def _run(name: str, task: Task, checkpoint: Path, tokens_per_s: float, limit_s: float) -> Compared:
    """Run a rival with the task's batch size, or with half of it, and so on, where its memory is too small."""
    until_s = time.monotonic() + limit_s
    num_rows = -(-len(task.prompts) // RIVALS[name].num_processes(task))
    task = replace(task, batch_size=min(task.batch_size, num_rows))
    while True:
        found = _try(name, task, checkpoint, tokens_per_s, round(until_s - time.monotonic()))
        if _OUT_OF_MEMORY not in found.failure or task.batch_size == 1:
            return found
        task = replace(task, batch_size=task.batch_size // 2)


def _try(name: str, task: Task, checkpoint: Path, tokens_per_s: float, limit_s: float) -> Compared:
    with tempfile.TemporaryDirectory(dir=task.scratch) as temporary:
        folder = Path(temporary)
        scratch, result, written, log = (folder / part for part in ("scratch", "result.json", "task.json", "log"))
        scratch.mkdir()
        own = {"rival": name, "checkpoint": str(checkpoint), "scratch": str(scratch), "result": str(result)}
        written.write_text(json.dumps({**asdict(task), **own}))
        failure = run_limited([sys.executable, "-m", "zinfer.jobs.rival_worker", str(written)], log, limit_s)
        if failure is not None and not (failure.startswith(STOPPED) and result.exists()):
            return Compared(name, failure=failure)
        figures = json.loads(result.read_text())
    theirs = figures["num_done"] * task.new_tokens / figures["job_s"]
    ratio = tokens_per_s / theirs
    return Compared(name, theirs, ratio, figures["start_s"], task.batch_size, figures["num_done"])


@contextmanager
def _checkpoint(outline: Checkpoint, scratch: Path) -> Iterator[Path]:
    """Write a random checkpoint, and remove it after the block.

    Raises:
        PlanError: it would not fit on the disk, or not in host memory, where rivals keep it.
    """
    check_room(outline, scratch)
    with tempfile.TemporaryDirectory(prefix="zinfer-rivals-", dir=scratch) as temporary:
        folder = Path(temporary)
        entries = list(outline.tensors.values())
        dtypes = Counter(entry.dtype for entry in entries if entry.dtype.is_floating_point)
        config = json.loads(outline.config_path.read_text())
        config["dtype"] = str(max(dtypes, key=lambda dtype: dtypes[dtype])).removeprefix("torch.")
        (folder / CONFIG_NAME).write_text(json.dumps(config))
        _write_shards(folder, entries)
        yield folder


def check_room(checkpoint: Checkpoint, scratch: Path) -> None:
    """Check that a checkpoint of these tensors can be written, and kept by rivals.

    Raises:
        PlanError: it would not fit on the disk, or not in host memory, where rivals keep it.
    """
    num_bytes = sum(entry.nbytes for entry in checkpoint.tensors.values())
    free_bytes, host_bytes = shutil.disk_usage(scratch).free, free_host_bytes()
    if num_bytes > free_bytes * (1 - _SPARE_SHARE):
        raise PlanError(
            f"--compare needs a real checkpoint of {human_bytes(num_bytes)}; {scratch} has {human_bytes(free_bytes)} "
            "free; state a larger disk as zero_optimization.offload_param.nvme_path, or leave --compare out"
        )
    if num_bytes > host_bytes:
        raise PlanError(
            f"--compare: rivals keep the weights in host memory, {human_bytes(num_bytes)} of it, and "
            f"{human_bytes(host_bytes)} are free; leave --compare out, or compare a model with fewer layers"
        )


def _write_shards(folder: Path, entries: Sequence[TensorEntry]) -> None:
    """Write tensors to files of about 2 GiB, with an index."""
    shard: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    held = number = 0
    for entry in entries:
        shard[entry.name] = _random_tensor(entry.shape, entry.dtype)
        held += entry.nbytes
        names[entry.name] = f"model-{number:05}.safetensors"
        if held >= _SHARD_BYTES or entry is entries[-1]:
            save_file(shard, folder / names[entry.name], metadata={"format": "pt"})
            shard, held, number = {}, 0, number + 1
    index = {"metadata": {}, "weight_map": names}
    (folder / f"model{SAFETENSORS_INDEX_SUFFIX}").write_text(json.dumps(index))


def _random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    num_values = int(torch.Size(shape).numel())
    piece = random_bytes(min(num_values * dtype.itemsize, 16 << 20), dtype).view(dtype)
    return piece.repeat(-(-num_values // len(piece)))[:num_values].view(shape).clone()
