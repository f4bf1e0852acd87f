"""Compares OPT-shaped layers with quantized weights, streamed and resident, with the same layers in fp16.

    python benchmarks/quantized.py [--formats fp16,int8,int4,w8a8] [--layers 12 --hidden 7168] [--out FILE]

For each format: a decode pass from host memory as a share of its bytes over the link, how fast homes fill while weights
are quantized as a share of the disk's rate, and with resident weights a decode pass and a prefill of 4,096 tokens over
the same in fp16.

First it checks that a smaller model's logits are bitwise equal from host memory and resident, and near those of fp16.
The last line is JSON.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Final

import torch
from ceilings import PlainReads, best_disk_setting, link_bytes_per_s
from passes import Passes
from random_model import drop_page_cache, save_random_opt
from result import keep, publish

import zinfer

FORMATS: Final[dict[str, dict[str, object] | None]] = {
    "fp16": None,
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group_size": 128},
    "w8a8": {"bits": 8, "activations": True},
    "fp8": {"bits": 8, "format": "fp8"},
    "fp8-products": {"bits": 8, "format": "fp8", "activations": True},
}
_GATE_LAYERS: Final = 3
_MOST_ERROR: Final = {"int8": 0.05, "int4": 0.5, "w8a8": 0.1, "fp8": 0.2, "fp8-products": 0.3}
"""Of the gate's logits, to catch nonsense."""


def config_for(format: str, home: str) -> dict[str, object]:
    """All layers in host memory, or resident."""
    section = FORMATS[format]
    device = {"host": "cpu", "resident": "none"}[home]
    ours = {} if section is None else {"quantization": section}
    return {"zero_optimization": {"offload_param": {"device": device}}, "zinfer": ours}


def check_formats(folder: Path, formats: list[str], hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """The gate."""
    save_random_opt(folder, _GATE_LAYERS, hidden, dtype, str(device))
    ids = torch.randint(10, 50000, (2, 16), generator=torch.Generator().manual_seed(1))
    logits: dict[tuple[str, str], torch.Tensor] = {}
    for format in ["fp16", *formats]:
        for home in ("resident", "host"):
            engine = zinfer.init_inference(folder, config_for(format, home))
            logits[format, home] = engine(input_ids=ids).logits.float()
            engine.destroy()
        if not torch.equal(logits[format, "resident"], logits[format, "host"]):
            raise SystemExit(f"gate: {format}: logits differ between homes; no figure is reported")
        full = logits["fp16", "resident"]
        error = float((logits[format, "host"] - full).norm() / full.norm())
        if format != "fp16" and not 0 < error < _MOST_ERROR[format]:
            raise SystemExit(f"gate: {format}: logits are off by {error:.3f} of fp16's; no figure is reported")
        print(f"gate: {format}: relative error of the logits {error:.4f}", flush=True)
    shutil.rmtree(folder)


class Bench:
    """One checkpoint, and the ceilings of the machine that it runs on."""

    def __init__(self, folder: Path, args: argparse.Namespace, device: torch.device) -> None:
        self._folder = folder
        self._args = args
        files = sorted(folder.glob("*.safetensors"))
        self._plain_reads = PlainReads(files, best_disk_setting(files))
        self._device = device

    def measure(self, format: str) -> dict[str, float]:
        return self._streamed(format) | self._resident(format)

    def _streamed(self, format: str) -> dict[str, float]:
        args = self._args
        drop_page_cache(self._folder)
        disk_rate = self._plain_reads.bytes_per_s()
        engine = zinfer.init_inference(self._folder, config_for(format, "host"))
        disk_rate = (disk_rate + self._plain_reads.bytes_per_s()) / 2
        print(format, engine.plan, flush=True)
        times = Passes(engine, args.batch, args.prompt).time(3, 12)
        stats, slot_bytes = engine.stats(), engine.plan.slot_bytes
        engine.destroy()
        link_rate = link_bytes_per_s(slot_bytes, self._device)
        decode_s, bytes_per_pass = statistics.median(times.decode_s), stats.streamed_bytes_per_pass
        return {
            "streamed_gb": round(bytes_per_pass / 1e9, 3),
            "link_gb_per_s": round(link_rate / 1e9, 3),
            "host_decode_s": round(decode_s, 5),
            "host_decode_share": round(bytes_per_pass / link_rate / decode_s, 4),
            "load_s": round(stats.load_s, 3),
            "load_share": round(stats.loaded_bytes / stats.load_s / disk_rate, 4),
        }

    def _resident(self, format: str) -> dict[str, float]:
        args = self._args
        engine = zinfer.init_inference(self._folder, config_for(format, "resident"))
        assert engine.stats().streamed_bytes_per_pass == 0
        decode = Passes(engine, args.batch, args.prompt).time(1, 20)
        prefill = Passes(engine, 8, args.prefill // 8).time(7, 1)
        engine.destroy()
        return {
            "resident_decode_s": round(statistics.median(decode.decode_s), 6),
            "prefill_s": round(statistics.median(prefill.prefill_s), 6),
        }


def with_ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each format's passes over those in fp16, where that was measured."""
    full = found.get("fp16")
    if full is None:
        return found
    names = ("host_decode_s", "resident_decode_s", "prefill_s")
    ratios = {
        f: {f"{name[:-2]}_of_fp16": round(row[name] / full[name], 4) for name in names} for f, row in found.items()
    }
    return {format: row | ratios[format] for format, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="fp16,int8,int4,w8a8")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prefill with resident weights")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    formats = args.formats.split(",")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        check_formats(Path(temporary) / "gate", formats, min(args.hidden, 1024), dtype, device)
        folder = Path(temporary) / "model"
        save_random_opt(folder, args.layers, args.hidden, dtype, str(device))
        bench = Bench(folder, args, device)
        for format in formats:
            found[format] = bench.measure(format)
            print(format, json.dumps(found[format]), flush=True)
            keep({"benchmark": "quantized", "formats": with_ratios(found)}, args.out)
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "batch", "prompt", "prefill")}
    work = {"benchmark": "quantized", **shape, "dtype": str(dtype).removeprefix("torch.")}
    publish(work | {"formats": with_ratios(found)}, args.out)


if __name__ == "__main__":
    main()
