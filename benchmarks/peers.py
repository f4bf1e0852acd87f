"""Decodes one saved OPT-shaped checkpoint with zinfer, Accelerate and DeepSpeed, and prints the speedups.

    python benchmarks/peers.py [--layers 12 --hidden 7168 --batch 8 --prompt 128]
        [--peers accelerate,deepspeed-cpu,deepspeed-nvme] [--limit 300] [--out FILE]

Each system runs in its own process, with a time limit; one that is not installed, crashes or takes too long is
reported, and the others continue. All decode the same prompts with the same `generate`. ``gb_per_s`` counts only the
layers' weights, whatever else a system moves; ``share`` is of the link (host tier) or of the disk (disk tier),
both measured in the same run. ``from_disk_gb`` is the kernel's count of bytes read from disks in a pass.

Each process first checks that greedy tokens of a small fp32 model equal transformers' own, and that the layers' weights
are in the requested tier. The last line is JSON.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from ceilings import PlainReads, best_disk_setting, link_bytes_per_s
from homes import blocks_of
from peer_systems import SYSTEMS, System, Tier, chosen_systems
from peer_worker import Work, greedy_options, layer_bytes
from random_model import drop_page_cache, random_opt, save_random_opt
from result import keep, publish
from transformers import OPTForCausalLM

from zinfer.jobs.limited_process import run_limited

_SMALL_LAYERS: Final = 4
_SMALL_HIDDEN: Final = 512  # DeepSpeed leaves in host memory what takes less than 1 MiB
_SMALL_SPREAD: Final = 15  # times the usual standard deviation: with less, a random model repeats one token
_LEAST_DISTINCT: Final = 8  # tokens: fewer of them equal say little
_NUM_LOG_LINES: Final = 12


@dataclass(frozen=True)
class Gate:
    """A small checkpoint, prompts, and the same with the tokens that transformers adds to them."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


def make_gate(folder: Path, device: torch.device) -> Gate:
    """Save a small fp32 model and let transformers alone, with all weights on the device, continue two prompts."""
    model = random_opt(_SMALL_LAYERS, _SMALL_HIDDEN, torch.float32, "cpu")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(_SMALL_SPREAD)
    model.save_pretrained(folder)
    prompts = torch.randint(10, 50000, (2, 16), generator=torch.Generator().manual_seed(1))
    model = OPTForCausalLM.from_pretrained(folder).to(device).eval()
    tokens = model.generate(**greedy_options(prompts.to(device), 8)).tolist()
    distinct = {token for row in tokens for token in row[prompts.shape[1] :]}
    assert len(distinct) >= _LEAST_DISTINCT, f"the gate's model makes only the tokens {distinct}"
    return Gate(folder, prompts.tolist(), tokens)


def measure_ceilings(folder: Path, device: torch.device) -> dict[Tier, float]:
    """Bytes per second of the link, with copies of a block's size, and of the disk at its best setting."""
    largest = max(blocks_of(folder), key=lambda block: block.nbytes).nbytes
    files = sorted(folder.glob("*.safetensors"))
    disk_rate = PlainReads(files, best_disk_setting(files)).bytes_per_s()
    return {"host": link_bytes_per_s(largest, device), "disk": disk_rate}


def run_system(system: System, folder: Path, gate: Gate, args: argparse.Namespace) -> dict[str, float] | str:
    """What the system's own process measured, or in words why it did not."""
    if importlib.util.find_spec(system.package) is None:
        return f"{system.package}: not installed"
    drop_page_cache(folder)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        scratch, result, log = (Path(temporary) / name for name in ("scratch", "result.json", "log"))
        scratch.mkdir()
        work = Work(
            system=system.name,
            small=str(gate.folder),
            prompts=gate.prompts,
            tokens=gate.tokens,
            large=str(folder),
            batch=args.batch,
            prompt=args.prompt,
            scratch=str(scratch),
            result=str(result),
            new=getattr(args, "new", 0),
        )
        task = Path(temporary) / "work.json"
        task.write_text(json.dumps(asdict(work)))
        worker = Path(__file__).with_name("peer_worker.py")
        failure = run_limited([sys.executable, str(worker), str(task)], log, args.limit)
        if failure is None:
            figures: dict[str, float] = json.loads(result.read_text())
            return figures
        print("\n".join(log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]), flush=True)
        return failure


def with_ratios(
    found: Mapping[str, dict[str, float] | str], streamed_bytes: int, ceilings: Mapping[Tier, float]
) -> dict[str, dict[str, object]]:
    """Each system's figures with its rate, its share of the ceiling and the factor against zinfer in the same tier."""
    rows: dict[str, dict[str, object]] = {}
    for system in SYSTEMS:
        figures = found.get(system.name)
        if figures is None:
            continue
        if isinstance(figures, str):
            rows[system.name] = {"tier": system.tier, "failed": figures}
            continue
        ours = found[f"zinfer-{system.tier}"]
        rate = streamed_bytes / figures["decode_s"]
        rows[system.name] = {
            "tier": system.tier,
            "decode_s": round(figures["decode_s"], 5),
            "gb_per_s": round(rate / 1e9, 3),
            "share": round(rate / ceilings[system.tier], 4),
            "times_zinfer_s": None if isinstance(ours, str) else round(figures["decode_s"] / ours["decode_s"], 3),
            "from_disk_gb": round(figures["read_bytes"] / 1e9, 3),
            "start_s": round(figures["start_s"], 2),
        }
    return rows


def print_table(rows: Mapping[str, Mapping[str, object]]) -> None:
    columns = ("decode_s", "gb_per_s", "share", "times_zinfer_s", "from_disk_gb", "start_s")
    print(f"{'':20}" + "".join(f"{column:>15}" for column in columns))
    for name, row in rows.items():
        cells = row.get("failed") or "".join(f"{row[column]!s:>15}" for column in columns)
        print(f"{name:20}{cells}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    return parse_with_systems(parser, "accelerate,deepspeed-cpu,deepspeed-nvme", SYSTEMS)


def parse_with_systems(parser: argparse.ArgumentParser, peers: str, systems: Sequence[System]) -> argparse.Namespace:
    """The options of a benchmark of systems, ``systems`` being those that were chosen; ``peers`` are so by default."""
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--peers", default=peers)
    parser.add_argument("--limit", type=float, default=300, help="seconds that a system may take, all in all")
    parser.add_argument("--folder", type=Path, help="where everything is written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        args.systems = chosen_systems(args.peers.split(","), systems)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        gate = make_gate(Path(temporary) / "small", device)
        folder = Path(temporary) / "model"
        save_random_opt(folder, args.layers, args.hidden, dtype, str(device))
        ceilings, streamed_bytes = measure_ceilings(folder, device), layer_bytes(folder)
        found: dict[str, dict[str, float] | str] = {}
        for system in args.systems:
            found[system.name] = run_system(system, folder, gate, args)
            print(system.name, found[system.name], flush=True)
            rows = with_ratios(found, streamed_bytes, ceilings)
            keep({"benchmark": "peers", "systems": rows}, args.out)
    print_table(rows)
    packages = sorted(
        {system.package for system in args.systems if importlib.util.find_spec(system.package)} - {"zinfer"}
    )
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "batch", "prompt")}
    work = {
        "benchmark": "peers",
        **shape,
        "dtype": str(dtype).removeprefix("torch."),
        "layers_gb": streamed_bytes / 1e9,
    }
    rates = {"link_gb_per_s": round(ceilings["host"] / 1e9, 3), "disk_gb_per_s": round(ceilings["disk"] / 1e9, 3)}
    versions = {package: importlib.metadata.version(package) for package in packages}
    publish(work | rates | {"systems": rows}, args.out, versions)


if __name__ == "__main__":
    main()
