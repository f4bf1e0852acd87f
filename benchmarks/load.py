"""Times loading a cold checkpoint into pinned host memory and onto the device, up to the first token.

    python benchmarks/load.py [--layers 12 --hidden 7168] [--out FILE]

``load_share`` is the rate at which the homes fill, as a share of the lesser of the disk's rate (reading the same files
alone, before and after) and the rate of touching and registering memory. ``first_token_s`` is the
time from the call of `init_inference` to one prompt's first token, in a process that has torch and a CUDA context.

Checks that the token from every home is the same, and that every byte of the checkpoint was read. The last line is
JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from ceilings import PlainReads, best_disk_setting, pin_bytes_per_s
from homes import blocks_of, config_for
from random_model import drop_page_cache, save_random_opt
from result import keep, publish

import zinfer

CASES = ("host", "resident-100", "disk")


def load_once(folder: Path, case: str) -> tuple[dict[str, float], int]:
    """One cold start: seconds and bytes, and the first token."""
    drop_page_cache(folder)
    ids = torch.randint(10, 50000, (1, 128), generator=torch.Generator().manual_seed(3))
    begin_s = time.perf_counter()
    engine = zinfer.init_inference(folder, config_for(folder, case))
    made_s = time.perf_counter() - begin_s
    token = engine.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, pad_token_id=1)[0, -1]
    first_token_s = time.perf_counter() - begin_s
    stats = engine.stats()
    engine.destroy()
    figures = {
        "made_s": made_s,
        "load_s": stats.load_s,
        "first_token_s": first_token_s,
        "loaded_gb": stats.loaded_bytes / 1e9,
        "pinned_gb": stats.pinned_bytes / 1e9,
    }
    return figures, int(token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        save_random_opt(folder, args.layers, args.hidden, dtype, device)
        files = sorted(folder.glob("*.safetensors"))
        plain_reads = PlainReads(files, best_disk_setting(files))
        slabs = [block.nbytes for block in blocks_of(folder)]
        pin_rates: list[float] = []
        load_once(folder, "disk")  # imports, kernels
        disk_rates, tokens = [plain_reads.bytes_per_s()], set()
        for case in CASES:
            figures, shares = [], []
            for _ in range(args.repeats):
                once, token = load_once(folder, case)
                disk_rates.append(plain_reads.bytes_per_s())
                ceiling = statistics.mean(disk_rates[-2:])
                if case == "host" and device == "cuda":
                    pin_rates.append(pin_bytes_per_s(slabs))
                    ceiling = min(ceiling, pin_rates[-1])
                figures.append(once)
                shares.append(once["loaded_gb"] * 1e9 / once["load_s"] / ceiling)
                tokens.add(token)
            medians = {name: round(statistics.median(each[name] for each in figures), 3) for name in figures[0]}
            share = {} if case == "disk" else {"load_share": round(statistics.median(shares), 4)}
            found[case] = medians | share
            if len(tokens) != 1:
                raise SystemExit(f"gate: the first tokens differ: {tokens}; no figure is reported")
            print(case, json.dumps(found[case]), flush=True)
            keep({"benchmark": "load", "cases": found}, args.out)
    rates = {
        "disk_gb_per_s": round(statistics.median(disk_rates) / 1e9, 3),
        "pin_gb_per_s": round(statistics.median(pin_rates or [0.0]) / 1e9, 3),
    }
    work = {"benchmark": "load", "layers": args.layers, "hidden": args.hidden}
    publish(work | rates | {"cases": found}, args.out)


if __name__ == "__main__":
    main()
