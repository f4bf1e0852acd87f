"""Runs one system in this process, for `peers.py` and `peer_jobs.py`: checks it first, then measures a decode pass or a
whole job, and writes JSON.

    python benchmarks/peer_worker.py WORK.json

There is no figure if the tokens of the small model differ from transformers', or if the layers' weights are not in the
requested tier. Any error ends the process; its last line on stderr says why.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from homes import model_blocks
from job_systems import JOB_SYSTEMS
from peer_systems import SYSTEMS, Running, System, Tier
from transformers import StoppingCriteria, StoppingCriteriaList

_LEAST_AWAY: Final = 0.98  # of the layers' bytes: ZeRO keeps norms and biases on the device
_LEAST_EQUAL_IN_HALF: Final = 0.5  # of the gate's tokens, which a near tie parts for good
_NUM_WARM_UPS: Final = 3  # DeepSpeed learns in the first pass in which order the parameters are used
_NUM_DECODES: Final[dict[Tier, int]] = {"host": 12, "disk": 4}


@dataclass(frozen=True)
class Work:
    """What a process is asked to do.

    Attributes:
        small: the checkpoint folder of the gate.
        prompts, tokens: what it is given, and prompts with continuation as transformers makes them.
        large: the checkpoint folder that is timed, with ``batch`` sequences of ``prompt`` tokens.
        new: tokens of a whole job after each prompt, ``batch`` being all of its prompts; 0: a decode pass is timed.
        scratch: an empty folder, for what the system writes.
        result: the file that the figures are written to.
    """

    system: str
    small: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    large: str
    batch: int
    prompt: int
    scratch: str
    result: str
    new: int = 0


class _Passes(StoppingCriteria):  # type: ignore[misc]
    """Notes the seconds of each decode pass, and what was read from disks by then; stops nothing."""

    def __init__(self, before_pass: Callable[[], None]) -> None:
        self.seconds: list[float] = []
        self.read_bytes: list[int] = []
        self._before_pass = before_pass
        self._begin_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        done.cpu()  # waits for the compute, not for the copies
        if self._begin_s is not None:
            self.seconds.append(time.perf_counter() - self._begin_s)
        self.read_bytes.append(_read_bytes())
        self._before_pass()
        self._begin_s = time.perf_counter()
        return done


def _read_bytes() -> int:
    """Bytes that this process has made disks deliver, as the kernel counts them: the page cache's own are not in it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def layer_bytes(folder: Path) -> int:
    return sum(block.block.nbytes for block in model_blocks(folder) if block.is_layer)


def greedy_options(ids: torch.Tensor, num_new: int) -> dict[str, object]:
    """Arguments of `generate` for exactly ``num_new`` tokens a sequence."""
    lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 1} | lengths


def check_away(system: System, running: Running, folder: Path) -> None:
    """Refuse a system whose layers are not in their tier between passes: it would be timed without any offload."""
    away, wanted = running.away_bytes(), layer_bytes(folder)
    if away < _LEAST_AWAY * wanted:
        raise SystemExit(f"gate: {system.name}: {away} of the layers' {wanted} bytes lie in the {system.tier} tier")


def check_tokens(system: System, work: Work, device: torch.device) -> None:
    """The gate: from a small model the same greedy tokens as transformers' own."""
    scratch = Path(work.scratch) / "small"
    scratch.mkdir()
    running = system.start(Path(work.small), scratch, device)
    prompts = torch.tensor(work.prompts)
    num_new = len(work.tokens[0]) - len(work.prompts[0])
    tokens = running.generate(**greedy_options(prompts, num_new)).tolist()
    check_away(system, running, Path(work.small))
    running.close()
    length = len(work.prompts[0])
    equal = torch.tensor(tokens)[:, length:] == torch.tensor(work.tokens)[:, length:]
    if equal.double().mean() < (_LEAST_EQUAL_IN_HALF if system.is_half else 1):
        raise SystemExit(f"gate: {system.name}: tokens differ from transformers' own; no figure is reported")


def time_decodes(running: Running, work: Work, num_decodes: int) -> tuple[float, float]:
    """Seconds of a decode pass, the median, and bytes read from disks in one, the mean."""
    ids = torch.randint(10, 50000, (work.batch, work.prompt), generator=torch.Generator().manual_seed(2))
    passes = _Passes(running.before_pass)
    num_passes = 1 + _NUM_WARM_UPS + num_decodes
    running.generate(**greedy_options(ids, num_passes), stopping_criteria=StoppingCriteriaList([passes]))
    read = passes.read_bytes[_NUM_WARM_UPS:]
    return statistics.median(passes.seconds[_NUM_WARM_UPS:]), (read[-1] - read[0]) / num_decodes


def time_job(system: System, running: Running, work: Work) -> float:
    """Seconds of a job of random prompts, as many at once as the system takes, after one such lot of few tokens."""
    generator = torch.Generator().manual_seed(2)
    ids, warm_up = (torch.randint(10, 50000, (work.batch, work.prompt), generator=generator) for _ in range(2))
    num_rows = system.most_rows or work.batch
    running.generate(**greedy_options(warm_up[:num_rows], _NUM_WARM_UPS))
    begin_s = time.perf_counter()
    for begin in range(0, work.batch, num_rows):
        lot = ids[begin : begin + num_rows]
        tokens = running.generate(**greedy_options(lot, work.new))
        if tokens.shape != (len(lot), work.prompt + work.new):
            raise SystemExit(f"gate: {system.name}: {tuple(tokens.shape)} tokens for {len(lot)} prompts")
    return time.perf_counter() - begin_s


def main() -> None:
    work = Work(**json.loads(Path(sys.argv[1]).read_text()))
    system = next(system for system in (*SYSTEMS, *JOB_SYSTEMS) if system.name == work.system)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    check_tokens(system, work, device)
    gc.collect()
    scratch = Path(work.scratch) / "large"
    scratch.mkdir()
    begin_s = time.perf_counter()
    running = system.start(Path(work.large), scratch, device)
    start_s = time.perf_counter() - begin_s
    figures = {"start_s": start_s}
    if work.new:
        figures["job_s"] = time_job(system, running, work)
    else:
        figures["decode_s"], figures["read_bytes"] = time_decodes(running, work, _NUM_DECODES[system.tier])
    check_away(system, running, Path(work.large))
    running.close()
    Path(work.result).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
