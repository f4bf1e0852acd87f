"""Streams OPT-shaped layers from host memory and prints GB/s of weights, and their share of the link in the same run.

    python benchmarks/stream.py [--layers 12 --hidden 7168 --batch 8 --prompt 128 --new-tokens 8 --slots 2] [--out FILE]

A correctness gate comes first: a smaller model streamed equals the same model resident, to the bit. The decode step is
(seconds of a generate call with N+1 new tokens - seconds of one with 1) / N, both warmed up, medians of several. The
last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from card import machine_card
from opt_model import random_opt

import zinfer
from zinfer.offload.host_memory import HostBuffer

OFFLOAD = {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": True}}}


def median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call, the median of several, with the device idle before and after each."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        begin_s = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_link_bytes_per_s(nbytes: int, device: torch.device, repeats: int = 5) -> float:
    """Host-to-device copies of one block's size, back to back over two targets, from pinned memory."""
    pin = device.type == "cuda"
    host = HostBuffer(nbytes, pin=pin)
    targets = [torch.empty(host.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def copy() -> None:
        for count in range(8):
            targets[count % 2].copy_(host.tensor, non_blocking=True)

    copy()
    seconds = median_s(copy, device, repeats)
    host.close()
    return 8 * host.nbytes / seconds


def check_streamed_equals_resident(hidden: int, dtype: torch.dtype, device: torch.device, num_slots: int) -> None:
    """The gate: three layers of the same width, bit-equal logits."""
    ids = torch.randint(10, 50000, (2, 16), generator=torch.Generator().manual_seed(1))
    logits = []
    for offload in ("none", "cpu"):
        model = random_opt(3, hidden, dtype, str(device))
        config = {"zero_optimization": {"offload_param": {"device": offload}}, "zinfer": {"num_slots": num_slots}}
        engine = zinfer.init_inference(model, config)
        logits += [engine(input_ids=ids).logits for _ in range(2)]
        assert (engine.stats().streamed_bytes_per_pass > 0) == (offload == "cpu")
        engine.destroy()
    if not all(torch.equal(logits[0], other) for other in logits[1:]):
        raise SystemExit("gate: streamed logits differ from resident ones; no figure is reported")


def measure_steps(engine: zinfer.InferenceEngine, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a prefill (with one token) and of a decode step."""
    ids = torch.randint(10, 50000, (args.batch, args.prompt), generator=torch.Generator().manual_seed(2))
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 1}

    def generate(num_new: int) -> None:
        engine.generate(**options, max_new_tokens=num_new, min_new_tokens=num_new)

    generate(args.new_tokens + 1)
    prefill_s = median_s(lambda: generate(1), engine.device, args.repeats)
    whole_s = median_s(lambda: generate(args.new_tokens + 1), engine.device, args.repeats)
    return prefill_s, (whole_s - prefill_s) / args.new_tokens


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """The figures of one engine, the link's among them: before and after, the better of the two."""
    model = random_opt(args.layers, args.hidden, dtype, str(device))
    begin_s = time.perf_counter()
    engine = zinfer.init_inference(model, OFFLOAD, num_slots=args.slots)
    load_s = time.perf_counter() - begin_s
    print(engine.plan)
    link = measure_link_bytes_per_s(engine.plan.slot_bytes, device)
    prefill_s, step_s = measure_steps(engine, args)
    link = max(link, measure_link_bytes_per_s(engine.plan.slot_bytes, device))
    stats = engine.stats()
    engine.destroy()
    streamed = stats.streamed_bytes_per_pass
    return {
        "streamed_gb": round(streamed / 1e9, 3),
        "link_gb_per_s": round(link / 1e9, 2),
        "step_s": round(step_s, 5),
        "prefill_s": round(prefill_s, 5),
        "gb_per_s": round(streamed / step_s / 1e9, 2),
        "share_of_link": round(streamed / step_s / link, 4),
        "prefill_share_of_link": round(streamed / prefill_s / link, 4),
        "load_s": round(load_s, 2),
        "stall_s": {cause: round(seconds, 3) for cause, seconds in stats.stall_s.items()},
        "passes": stats.passes,
        "pinned_gb": round(stats.pinned_bytes / 1e9, 3),
    }


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    check_streamed_equals_resident(min(args.hidden, 1024), dtype, device, args.slots)
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "batch", "prompt", "slots")}
    work = {"benchmark": "stream", "tier": "host", **shape, "dtype": str(dtype).removeprefix("torch.")}
    line = json.dumps(work | measure(args, dtype, device) | {"card": machine_card()})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
