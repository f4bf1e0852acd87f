"""Completes one job with zinfer, DeepSpeed and FlexLLMGen, with weights in host memory, and prints the speedups.

    python benchmarks/peer_jobs.py [--layers 12 --hidden 7168] [--prompts 1024 --prompt 512 --new 32]
        [--peers deepspeed,flexgen] [--limit 300] [--out FILE]

A saved checkpoint of OPT's shape in 16 bits; prompts of random tokens, greedy. Each system runs in its own process,
with a time limit; one that is not installed, crashes or takes too long is reported, and the others continue. ``job_s``
is the seconds of all prompts, after a warm-up; ``times_zinfer_s`` the factor.

The correctness check is that of `peers.py`; for a system that computes in half precision, half of its tokens must be
equal. The last line is JSON.
"""

import argparse
import importlib.metadata
import importlib.util
import tempfile
from pathlib import Path

import torch
from job_systems import JOB_SYSTEMS
from peers import make_gate, parse_with_systems, run_system
from random_model import save_random_opt
from result import keep, publish


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", dest="batch", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    return parse_with_systems(parser, "deepspeed,flexgen", JOB_SYSTEMS)


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "batch", "prompt", "new")}
    rows: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        gate = make_gate(Path(temporary) / "small", device)
        folder = Path(temporary) / "model"
        save_random_opt(folder, args.layers, args.hidden, dtype, str(device))
        ours_s: float | None = None
        for system in args.systems:
            found = run_system(system, folder, gate, args)
            if isinstance(found, str):
                rows[system.name] = {"failed": found}
            else:
                seconds = found["job_s"]
                ours_s = seconds if system.package == "zinfer" else ours_s
                rows[system.name] = {
                    "job_s": round(seconds, 3),
                    "tokens_per_s": round(args.batch * args.new / seconds, 1),
                    "times_zinfer_s": None if ours_s is None else round(seconds / ours_s, 3),
                    "start_s": round(found["start_s"], 2),
                }
            print(system.name, rows[system.name], flush=True)
            keep({"benchmark": "peer_jobs", **shape, "systems": rows}, args.out)
    installed = {system.package for system in args.systems if importlib.util.find_spec(system.package)} - {"zinfer"}
    versions = {package: importlib.metadata.version(package) for package in sorted(installed)}
    publish({"benchmark": "peer_jobs", **shape, "systems": rows}, args.out, versions)


if __name__ == "__main__":
    main()
