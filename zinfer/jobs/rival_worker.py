"""Times one rival: ``python -m zinfer.jobs.rival_worker TASK.json``.

A rival that has ranks gets a process for each, in this process's group. The first writes the figures so far to the
task's result file after each batch. An error ends all with a traceback.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from zinfer.jobs.rivals import RIVALS, Task
from zinfer.jobs.token_rows import padded
from zinfer.ranks.numa import gpu_node, pin_to_node
from zinfer.ranks.sockets import reserve_port

_LAUNCHERS: Final = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")


def run_task(task: Task, rank: int, tell: Callable[[dict[str, float]], None]) -> None:
    """Load the rival and complete this rank's prompts.

    Args:
        tell: is given the figures after each batch: ``start_s``, ``job_s`` so far, and ``num_done`` prompts of all.

    Raises:
        RuntimeError: it made another number of tokens than was asked for.
    """
    if task.device == "cuda":
        _choose_gpu(rank, task)
    begin_s = time.perf_counter()
    model = RIVALS[task.rival].start(task)
    _wait_for_all()
    start_s = time.perf_counter() - begin_s
    own, num_processes = _rows_of(rank, task), RIVALS[task.rival].num_processes(task)
    begin_s = time.perf_counter()
    for begin in range(0, len(own), task.batch_size):
        _complete(model, task, own[begin : begin + task.batch_size])
        _wait_for_all()
        num_done = min(len(task.prompts), (begin + task.batch_size) * num_processes)
        tell({"start_s": start_s, "job_s": time.perf_counter() - begin_s, "num_done": num_done})


def _rows_of(rank: int, task: Task) -> list[list[int]]:
    """Return every so many of the prompts; some again if they are not a multiple: ranks take the same steps."""
    size, num_prompts = RIVALS[task.rival].num_processes(task), len(task.prompts)
    return [task.prompts[place % num_prompts] for place in range(rank, num_prompts + -num_prompts % size, size)]


def _choose_gpu(rank: int, task: Task) -> None:
    """Choose the rank's GPU and, as zinfer does, its processors; bound the memory of all its GPUs."""
    has_ranks = RIVALS[task.rival].has_ranks
    if task.device_bytes is not None:
        for number in [rank] if has_ranks else range(task.num_ranks):
            total_bytes = torch.cuda.mem_get_info(number)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, task.device_bytes / total_bytes), number)
    torch.cuda.set_device(rank)
    if task.num_ranks > 1:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not those of the rank that has started it
        pin_to_node(gpu_node(torch.device("cuda", rank)) if has_ranks else None)


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


@torch.no_grad()
def _complete(model: Any, task: Task, prompts: list[list[int]]) -> None:
    ids, mask = (each.to(task.device) for each in padded(prompts, side="left"))
    lengths = {"max_new_tokens": task.new_tokens, "min_new_tokens": task.new_tokens}
    found = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
    if found.shape != (len(prompts), ids.shape[1] + task.new_tokens):
        raise RuntimeError(f"{task.rival} returned {tuple(found.shape)} tokens for {len(prompts)} prompts")
    found.cpu()  # waits for the device


def _run_rank(rank: int, task: Task, port: int) -> None:
    if RIVALS[task.rival].has_ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(task.num_ranks), "LOCAL_WORLD_SIZE": str(task.num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = Path(task.result)

    def tell(figures: dict[str, float]) -> None:
        if rank == 0:
            written = result.with_suffix(".new")
            written.write_text(json.dumps(figures))
            written.replace(result)  # whole, whenever this process is killed

    run_task(task, rank, tell)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]  # of the rank that has started this process
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    num_processes = RIVALS[task.rival].num_processes(task)
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        if num_processes == 1:
            _run_rank(0, task, port)
        else:
            start_processes(_run_rank, (task, port), num_processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
