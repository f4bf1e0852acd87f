"""Times one rival in this process: ``python -m zinfer.jobs.rival_worker TASK.json``.

It writes the seconds of loading and of the job to the task's result file. An error ends the process with a traceback.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from zinfer.jobs.rivals import RIVALS, Task
from zinfer.jobs.token_rows import padded


def run_task(task: Task) -> dict[str, float]:
    """Load the rival and complete all prompts.

    Returns:
        ``start_s`` and ``job_s``.

    Raises:
        RuntimeError: it made another number of tokens than was asked for.
    """
    begin_s = time.perf_counter()
    model = RIVALS[task.rival].start(task)
    start_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    for begin in range(0, len(task.prompts), task.batch_size):
        _complete(model, task, task.prompts[begin : begin + task.batch_size])
    return {"start_s": start_s, "job_s": time.perf_counter() - begin_s}


@torch.no_grad()
def _complete(model: Any, task: Task, prompts: list[list[int]]) -> None:
    ids, mask = (each.to(task.device) for each in padded(prompts, side="left"))
    lengths = {"max_new_tokens": task.new_tokens, "min_new_tokens": task.new_tokens}
    found = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
    if found.shape != (len(prompts), ids.shape[1] + task.new_tokens):
        raise RuntimeError(f"{task.rival} returned {tuple(found.shape)} tokens for {len(prompts)} prompts")
    found.cpu()  # waits for the device


def main() -> None:
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    Path(task.result).write_text(json.dumps(run_task(task)))


if __name__ == "__main__":
    main()
