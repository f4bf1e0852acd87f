"""Measures `zinfer run` as a user starts it: fresh processes on a checkpoint, with cold and then with warm caches.

    python benchmarks/as_started.py [--shape opt-30b] [--layers 12] [--jobs equal,mixed,host] [--sizes 2048,8192]
                                    [--once] [--ranks 2] [--serve] [--small] [--folder DIR] [--out FILE]

The weights are random and on the disk alone, the rows token ids, and all takes place in ``--folder``, by default a
temporary one; a folder that is named is kept, with its checkpoint. `JOBS` has the jobs. The first process of the folder
finds neither compiled kernels (``TRITON_CACHE_DIR``) nor measured rates (``XDG_CACHE_HOME``) and is *cold*; a job's
second process is *warm*, with ``--once`` its only one beside that.

``job_over_predicted`` is the seconds of passes over those that the planner predicts for just these passes,
``over_plan`` over the seconds that the job's first prediction promised. ``process_over`` is the whole process over what
cannot be avoided: reading the checkpoint at the disk's plain rate, and the predicted passes. ``phase_s`` is where the
rest went. ``--sizes`` runs each job once more with passes of that many tokens; ``over_best`` is the seconds of the
planner's passes over those of the best size. ``--serve`` measures a server's seconds to readiness. The last line is
JSON.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from ceilings import PlainReads, best_disk_setting
from random_model import llama_config, opt_config, save_random
from result import keep, publish
from transformers import LlamaConfig, PretrainedConfig


@dataclass(frozen=True)
class Job:
    """Rows and what a run of them is told.

    Attributes:
        rows, prompt, new: their number, tokens of each, and new tokens of each.
        mixed: lengths are exponential with these means, prompts at most three times and new tokens six times as long.
        home: of the weights, ``cpu`` or ``nvme``; None: where the planner puts them.
        options: of the command line.
        own: members of ``zinfer`` in the configuration.
    """

    rows: int
    prompt: int = 512
    new: int = 32
    mixed: bool = False
    home: str | None = None
    options: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)


JOBS: Final = {
    "equal": Job(1024),
    "mixed": Job(1024, mixed=True),
    "mixed-256": Job(256, mixed=True),
    "short": Job(32, new=8),
    "equal-2048": Job(2048),
    "host": Job(1024, home="cpu"),
    "host-fast": Job(1024, home="cpu", options=("--fast",)),
    "host-2048-fast": Job(2048, home="cpu", options=("--fast",)),
    "disk-64": Job(64, home="nvme"),
    "int4": Job(1024, own={"quantization": {"bits": 4, "group_size": 128}}),
    "capped": Job(400, 392, 64, mixed=True, own={"max_device_memory": "12GB"}),
}


def config_of(args: argparse.Namespace) -> PretrainedConfig:
    """The shape of the checkpoint."""
    if args.small:
        return opt_config(2, 256)
    if args.shape == "llama-3-8b":
        return LlamaConfig(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
    return llama_config(args.layers) if args.shape == "llama-3-70b" else opt_config(args.layers, 7168)


def write_job(name: str, size: int | None, folder: Path) -> None:
    """Write the rows and the configuration of a job, ``rows-NAME.jsonl`` and ``config-NAME.json``."""
    job = JOBS[name]
    (folder / f"rows-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(job)))
    keys: dict[str, Any] = {"zinfer": dict(job.own)}
    if size is not None:
        keys["zinfer"]["tokens_per_pass"] = size
    if job.home is not None:
        offload = {"device": job.home} | ({"nvme_path": str(folder / "store")} if job.home == "nvme" else {})
        keys["zero_optimization"] = {"offload_param": offload}
    (folder / f"config-{name}.json").write_text(json.dumps(keys))


def make_rows(job: Job) -> list[dict[str, Any]]:
    """Rows of random token ids, the same at each call."""
    draw = random.Random(1)

    def length(mean: int, least: int, most: int) -> int:
        return min(max(round(draw.expovariate(1 / mean)), least), most * mean) if job.mixed else mean

    return [
        {
            "id": str(number),
            "prompt_token_ids": [draw.randrange(10, 50000) for _ in range(length(job.prompt, 16, 3))],
            "max_new_tokens": length(job.new, 1, 6),
        }
        for number in range(job.rows)
    ]


def start(words: list[str], folder: Path, **more: Any) -> subprocess.Popen[str]:
    """Start ``zinfer`` with its output in a pipe, and with the caches of the folder."""
    caches = {"TRITON_CACHE_DIR": str(folder / "kernels"), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **caches}
    print("zinfer", *words, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "zinfer", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment, **more)


def run(name: str, num_ranks: int, folder: Path, size: int | None = None) -> dict[str, Any]:
    """Run a job in a process of its own; returns its figures."""
    write_job(name, size, folder)
    files = ["--model", "model", "--input", f"rows-{name}.jsonl", "--output", "out.jsonl"]
    options = ["--config", f"config-{name}.json", "--ranks", str(num_ranks), "--restart", "--json"]
    begin_s = time.perf_counter()
    process = start(["run", *files, *options, *JOBS[name].options], folder)
    said = process.communicate()[0]
    process_s = time.perf_counter() - begin_s
    if process.returncode:
        raise RuntimeError(f"zinfer run ended with {process.returncode}")
    found = json.loads(said.splitlines()[-1])
    promised_s, predicted_s = found["predicted_s"], found["passes_predicted_s"]
    return {
        "process_s": round(process_s, 3),
        "phase_s": {phase: round(seconds, 3) for phase, seconds in found["phase_s"].items()},
        "running_s": round(found["running_s"], 3),
        "computing_s": round(found["computing_s"], 3),
        "predicted_s": round(predicted_s, 3),
        "promised_s": round(promised_s, 3),
        "job_over_predicted": round(found["computing_s"] / predicted_s, 4),
        "over_plan": round(found["running_s"] / promised_s, 4),
        "tokens_per_s": round(found["tokens_per_s"], 1),
        "passes": found["ranks"][0]["passes"],
        "stall_s": found["ranks"][0]["stall_s"],
        "notes": found["notes"],
    }


def until_ready_s(num_ranks: int, folder: Path) -> float:
    """Seconds until `zinfer serve` says that it serves; its port is a free one."""
    begin_s = time.perf_counter()
    options = ["--port", "0", "--ranks", str(num_ranks)]
    process = start(["serve", "--model", "model", *options], folder, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said = ""
    while "serving " not in said:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended: {said}")
        said += line
    ready_s = time.perf_counter() - begin_s
    process.terminate()
    process.communicate()
    return round(ready_s, 1)


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoint, unless the folder has it, and run all jobs."""
    is_cold = not (folder / "kernels").exists()
    if not (folder / "model").exists():
        dtype, device = (torch.float16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
        save_random(folder / "model", config_of(args), dtype, device)
    files = sorted((folder / "model").glob("*.safetensors"))
    file_bytes = sum(file.stat().st_size for file in files)
    rate = PlainReads(files, best_disk_setting(files)).bytes_per_s()
    layers = config_of(args).num_hidden_layers
    figures: dict[str, Any] = {"benchmark": "as_started", "model": args.shape, "layers": layers, "ranks": args.ranks}
    figures |= {"file_gb": round(file_bytes / 1e9, 3), "disk_gb_per_s": round(rate / 1e9, 3)}
    cases: dict[str, dict[str, Any]] = figures.setdefault("cases", {})
    for name in filter(None, args.jobs.split(",")):
        states = ("cold", "warm") if is_cold else ("warm",) if args.once else ("first", "warm")
        for state in states:
            found = cases[f"{name}, {state}"] = run(name, args.ranks, folder)
            found["process_over"] = round(found["process_s"] / (file_bytes / rate + found["predicted_s"]), 4)
            keep(figures, args.out)
        is_cold = False
        sized = {size: run(name, args.ranks, folder, size) for size in args.sizes}
        if sized:
            found["sizes_s"] = {str(size): each["computing_s"] for size, each in sized.items()}
            found["over_best"] = round(found["computing_s"] / min(found["sizes_s"].values()), 4)
    if args.serve:
        cases |= {f"serve, {state}": {"ready_s": until_ready_s(args.ranks, folder)} for state in ("first", "warm")}
    publish(figures, args.out)


def main() -> None:
    """Measure jobs with cold caches, then with warm ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-30b", choices=["opt-30b", "llama-3-70b", "llama-3-8b"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--jobs", default="equal", help=f"separated by commas, of {', '.join(JOBS)}")
    parser.add_argument("--sizes", type=lambda value: [int(size) for size in value.split(",")], default=[])
    parser.add_argument("--once", action="store_true", help="one process a job, once the caches are there")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--small", action="store_true", help="narrow layers, which run anywhere")
    parser.add_argument("--folder", type=Path, help="where everything is written and kept; by default temporary")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        measure(args, args.folder.absolute())
        return
    with tempfile.TemporaryDirectory() as temporary:
        measure(args, Path(temporary))


if __name__ == "__main__":
    main()
