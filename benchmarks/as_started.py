"""Measures `zinfer run` as a user starts it: fresh processes on a checkpoint, with cold and then with warm caches.

    python benchmarks/as_started.py [--shape opt-30b --layers 12] [--rows 1024 --prompt 512 --new 32] [--bits 4]
                                    [--cap 24GB] [--fast] [--small] [--folder DIR] [--out FILE]

The weights are random and on the disk alone, the rows token ids, and all takes place in ``--folder``, by default a
temporary one. The first process finds neither compiled kernels (``TRITON_CACHE_DIR``) nor measured rates
(``XDG_CACHE_HOME``); the second finds those of the first.

``job_over_predicted`` is the seconds of passes over those that the planner predicts for just these passes,
``over_plan`` over the seconds that the job's first prediction promised. ``process_over`` is the whole process over what
cannot be avoided: reading the checkpoint at the disk's plain rate, and the predicted passes. ``phase_s`` is where the
rest went. The last line is JSON.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ceilings import PlainReads, best_disk_setting
from random_model import llama_config, opt_config, save_random
from result import keep, publish


def write_job(args: argparse.Namespace, folder: Path) -> None:
    """Write a checkpoint, rows and a configuration."""
    num_layers, width = (2, 256) if args.small else (args.layers, 7168)
    config = llama_config(num_layers) if args.shape == "llama-3-70b" else opt_config(num_layers, width)
    dtype, device = (torch.float16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    save_random(folder / "model", config, dtype, device)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(args)))
    offload = {"device": "cpu"} if args.homes == "cpu" else {"device": "nvme", "nvme_path": str(folder / "store")}
    keys: dict[str, Any] = {} if args.homes == "auto" else {"zero_optimization": {"offload_param": offload}}
    own: dict[str, Any] = {} if args.cap is None else {"max_device_memory": args.cap}
    own |= {"quantization": {"bits": args.bits, "group_size": 128}} if args.bits < 16 else {}
    (folder / "config.json").write_text(json.dumps({**keys, "zinfer": own}))


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of equal lengths; or mixed ones, exponential with these means and at most four and six times as long."""
    draw = random.Random(1)

    def length(mean: int, least: int, most: int) -> int:
        return min(max(round(draw.expovariate(1 / mean)), least), most * mean) if args.mixed else mean

    return [
        {
            "id": str(number),
            "prompt_token_ids": [draw.randrange(10, 50000) for _ in range(length(args.prompt, 16, 4))],
            "max_new_tokens": length(args.new, 1, 6),
        }
        for number in range(args.rows)
    ]


def run(args: argparse.Namespace, folder: Path, case: str) -> dict[str, Any]:
    """Run the job in a process of its own; returns its figures."""
    files = ["--model", "model", "--input", "rows.jsonl", "--output", f"{case}.jsonl", "--config", "config.json"]
    words = ["run", *files, "--json", *(["--fast"] if args.fast else [])]
    caches = {"TRITON_CACHE_DIR": str(folder / "kernels"), "XDG_CACHE_HOME": str(folder / "cache")}
    print("zinfer", *words, file=sys.stderr, flush=True)
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "zinfer", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **caches},
    )
    process_s = time.perf_counter() - begin_s
    found = json.loads(done.stdout.splitlines()[-1])
    promised_s, predicted_s = found["predicted_s"], found["passes_predicted_s"]
    return {
        "process_s": round(process_s, 3),
        "phase_s": {phase: round(seconds, 3) for phase, seconds in found["phase_s"].items()},
        "running_s": round(found["running_s"], 3),
        "predicted_s": round(predicted_s, 3),
        "promised_s": round(promised_s, 3),
        "job_over_predicted": round(found["computing_s"] / predicted_s, 4),
        "over_plan": round(found["running_s"] / promised_s, 4),
        "tokens_per_s": round(found["tokens_per_s"], 1),
        "passes": found["ranks"][0]["passes"],
        "stall_s": found["ranks"][0]["stall_s"],
        "notes": found["notes"],
    }


def main() -> None:
    """Measure a job with cold caches, then with warm ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-30b", choices=["opt-30b", "llama-3-70b"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--mixed", action="store_true", help="rows of mixed lengths with these means")
    parser.add_argument("--bits", type=int, default=16, choices=[16, 8, 4])
    parser.add_argument("--homes", default="auto", choices=["auto", "cpu", "nvme"])
    parser.add_argument("--cap", help="max_device_memory")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--small", action="store_true", help="narrow layers, which run anywhere")
    parser.add_argument("--folder", type=Path, help="where everything is written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        write_job(args, folder)
        files = sorted((folder / "model").glob("*.safetensors"))
        file_bytes = sum(file.stat().st_size for file in files)
        rate = PlainReads(files, best_disk_setting(files)).bytes_per_s()
        sizes = {
            name: getattr(args, name) for name in ("shape", "layers", "rows", "prompt", "new", "mixed", "bits", "cap")
        }
        figures: dict[str, Any] = {"benchmark": "as_started", **sizes, "file_gb": round(file_bytes / 1e9, 3)}
        figures |= {"disk_gb_per_s": round(rate / 1e9, 3), "cases": {}}
        for case in ("cold", "warm"):
            found = run(args, folder, case)
            found["process_over"] = round(found["process_s"] / (file_bytes / rate + found["predicted_s"]), 4)
            figures["cases"][case] = found
            keep(figures, args.out)
    publish(figures, args.out)


if __name__ == "__main__":
    main()
