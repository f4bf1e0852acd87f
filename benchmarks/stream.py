"""Streams OPT-shaped layers from every tier and prints seconds per pass as shares of ceilings of the same run.

    python benchmarks/stream.py [--cases host,disk,half,resident-0,...] [--layers 12 --hidden 7168] [--out FILE]

Cases: all layers on the host; all on disk; alternating; 0, 25, 50, 75 % resident, the rest on the host; `overhead`, the
host's time for a block of hardly any bytes. ``bound_s`` is the longer of the link's and the disk's time for the bytes,
``over_predicted`` the time taken over the plan's prediction with the ceilings of this run. A disk's rate drifts by tens
of percent within minutes, so the same files are read alone before and after each two passes, and all figures are
medians over such rounds.

First it checks that a smaller model's logits are bitwise equal from every home. The last line is JSON.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from ceilings import PlainReads, best_disk_setting, link_bytes_per_s
from homes import CASES, blocks_of, config_for, model_blocks
from overhead import measure_overhead
from passes import Passes, PassTimes
from random_model import drop_page_cache, save_random_opt
from result import keep, publish

import zinfer
from zinfer.model.spec import ModelSpec
from zinfer.offload.stats import RunStats
from zinfer.planning.block_work import find_work
from zinfer.planning.memory import Request, find_footprint
from zinfer.planning.step_time import PassClock, Prediction
from zinfer.probe.known_rates import known_rates

_GATE_LAYERS = 5
_DISK_ROUNDS = 6


@dataclass(frozen=True)
class Round:
    """Passes, and the disk's rate around them (bytes per second; 0 where nothing is read)."""

    times: PassTimes
    disk_rate: float


def check_homes_agree(folder: Path, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """The gate: a smaller model, bit-equal logits from every home, and bytes moved as planned."""
    save_random_opt(folder, _GATE_LAYERS, hidden, dtype, str(device))
    ids = torch.randint(10, 50000, (2, 16), generator=torch.Generator().manual_seed(1))
    wanted: torch.Tensor | None = None
    for case in ("resident-100", "host", "disk", "half", "resident-50"):
        engine = zinfer.init_inference(folder, config_for(folder, case))
        logits = [engine(input_ids=ids).logits for _ in range(3)]
        stats = engine.stats()
        engine.destroy()
        wanted = logits[0] if wanted is None else wanted
        if not all(torch.equal(wanted, other) for other in logits):
            raise SystemExit(f"gate: {case}: logits differ from resident ones; no figure is reported")
        if (stats.streamed_bytes_per_pass > 0) == (case == "resident-100"):
            raise SystemExit(f"gate: {case}: {stats.streamed_bytes_per_pass} bytes are streamed a pass")
    shutil.rmtree(folder)


class Bench:
    """One checkpoint, and the ceilings of the machine that it runs on."""

    def __init__(self, folder: Path, args: argparse.Namespace, device: torch.device) -> None:
        self._folder = folder
        self._args = args
        files = sorted(folder.glob("*.safetensors"))
        self._plain_reads = PlainReads(files, best_disk_setting(files))
        self._device = device
        self._slab_bytes = max(block.nbytes for block in blocks_of(folder))
        self.link_rate = link_bytes_per_s(self._slab_bytes, device)
        self.disk_rates = [self._read()]
        indexed = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self._rates = known_rates(indexed, files)

    def measure(self, case: str) -> dict[str, object]:
        """One engine's passes, beside what bounds them."""
        args = self._args
        drop_page_cache(self._folder)
        engine = zinfer.init_inference(self._folder, config_for(self._folder, case, args.slots))
        print(case, engine.plan, flush=True)
        reads = engine.stats().disk_bytes_per_pass > 0
        passes = Passes(engine, args.batch, args.prompt)
        rounds = list(self._disk_rounds(engine, passes)) if reads else [Round(passes.time(5, 12), 0.0)]
        self.link_rate = max(self.link_rate, link_bytes_per_s(self._slab_bytes, self._device))
        predictions = [self._predict(engine, each) for each in rounds]
        stats, num_slots = engine.stats(), engine.plan.num_slots
        engine.destroy()
        found: dict[str, object] = {
            "slots": num_slots,
            "streamed_gb": round(stats.streamed_bytes_per_pass / 1e9, 3),
            "from_disk_gb": round(stats.disk_bytes_per_pass / 1e9, 3),
        }
        for name in ("decode", "prefill"):
            bounds = [self._bound_s(stats, each.disk_rate) for each in rounds]
            seconds = [statistics.median(getattr(each.times, f"{name}_s")) for each in rounds]
            shares = [bound / taken for bound, taken in zip(bounds, seconds, strict=True)]
            predicted = [getattr(prediction, name).seconds for prediction in predictions]
            errors = [taken / foreseen for taken, foreseen in zip(seconds, predicted, strict=True)]
            found |= {
                f"{name}_s": round(statistics.median(seconds), 5),
                f"{name}_bound_s": round(statistics.median(bounds), 5),
                f"{name}_share": round(statistics.median(shares), 4),
                f"{name}_over_predicted": round(statistics.median(errors), 4),
            }
        stalls = {cause: round(seconds, 3) for cause, seconds in stats.stall_s.items()}
        return found | {"stall_s": stalls, "pinned_gb": round(stats.pinned_bytes / 1e9, 3)}

    def _disk_rounds(self, engine: zinfer.InferenceEngine, passes: Passes) -> Iterator[Round]:
        for _ in range(_DISK_ROUNDS):
            _rest(engine)
            before = self._read()
            times = passes.time(1, 1)
            _rest(engine)
            self.disk_rates += [before, self._read()]
            yield Round(times, statistics.mean(self.disk_rates[-2:]))
            print(f"passes: {times}", flush=True)

    def _predict(self, engine: zinfer.InferenceEngine, each: Round) -> Prediction:
        """What the plan says with the ceilings of this run."""
        args = self._args
        disk_rate = each.disk_rate or self.disk_rates[-1]
        rates = replace(self._rates, link_bytes_per_s=self.link_rate, disk_bytes_per_s=disk_rate, origin="this run")
        shape, request = ModelSpec.read(engine.module.config), Request(args.batch, args.prompt, 12)
        footprint = find_footprint(shape, engine.module.dtype, request)
        clock = PassClock(engine.plan, find_work(model_blocks(self._folder), shape), rates)
        return clock.predict(request, footprint)

    def _bound_s(self, stats: RunStats, disk_rate: float) -> float:
        link_s = stats.streamed_bytes_per_pass / self.link_rate
        return max(link_s, stats.disk_bytes_per_pass / disk_rate if disk_rate else 0.0)

    def _read(self) -> float:
        rate = self._plain_reads.bytes_per_s()
        print(f"disk: {rate / 1e9:.3f} GB/s with nothing else to do", flush=True)
        return rate


def _rest(engine: zinfer.InferenceEngine) -> None:
    """Wait until the engine has fetched what it fetches ahead: it would share the disk with who reads next."""
    assert engine._runtime is not None
    reader, read_bytes = engine._runtime._reader, -1
    while reader.bytes_read != read_bytes:
        read_bytes = reader.bytes_read
        time.sleep(0.3)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--slots", type=int, help="by default what the plan chooses")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        check_homes_agree(Path(temporary) / "gate", min(args.hidden, 1024), dtype, device)
        folder = Path(temporary) / "model"
        save_random_opt(folder, args.layers, args.hidden, dtype, str(device))
        bench = Bench(folder, args, device)
        for case in args.cases.split(","):
            found[case] = measure_overhead(Path(temporary) / "tiny") if case == "overhead" else bench.measure(case)
            print(case, json.dumps(found[case]), flush=True)
            keep({"benchmark": "stream", "cases": found}, args.out)
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "batch", "prompt")}
    rates = {"link_gb_per_s": bench.link_rate / 1e9, "disk_gb_per_s": statistics.median(bench.disk_rates) / 1e9}
    ceilings = {name: round(rate, 3) for name, rate in rates.items()}
    work = {"benchmark": "stream", **shape, "dtype": str(dtype).removeprefix("torch.")}
    publish(work | ceilings | {"cases": found}, args.out)


if __name__ == "__main__":
    main()
