"""A 3 GB checkpoint runs on the CPU within 1.2 GB, past the page cache, writing nothing but its rows."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import drop_page_cache

ROOT = Path(__file__).parents[1]
MEASURED_JOB = """
import json, sys
import psutil
import zinfer.engine.engine
from zinfer.jobs import run_job
from transformers import AutoTokenizer, LlamaForCausalLM

def written_bytes():
    return int(dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())["write_bytes"])

before = psutil.Process().memory_info().rss
written = written_bytes()
model, rows, out, config = sys.argv[1:]
summary = run_job(model=model, input=rows, output=out, config=config, device="cpu", max_new_tokens=3, batch_size=4)
# Not ru_maxrss: that begins with the peak of the process that started this one.
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
stats = summary.stats
print(json.dumps({"rss_growth": peak - before, "written": written_bytes() - written, "passes": stats.passes,
                  "read": stats.bytes_read_disk, "disk_bytes_per_pass": stats.disk_bytes_per_pass,
                  "homes": stats.blocks_by_home}))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big") / "model"
    shape = ["--hidden", "2048", "--intermediate", "5632", "--layers", "17", "--vocab", "512", "--dtype", "float32"]
    command = [sys.executable, ROOT / "scripts/make_random_checkpoint.py", folder, *shape]
    subprocess.run([*command, "--tokenizer", ROOT / "examples/demo/model"], check=True)
    drop_page_cache(folder)
    return folder


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache (mincore(2) over a fresh mapping)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view:
        num_pages = -(-len(view) // mmap.PAGESIZE)
        pages = (ctypes.c_ubyte * num_pages)()
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(len(view)), mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), pages) == 0
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(len(view)))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.slow
@pytest.mark.large
def test_three_gigabytes_run_within_1200_megabytes(big: Path, tmp_path: Path) -> None:
    shards = sorted(big.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in shards)
    assert total >= 3_000_000_000
    rows, out, config = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "config.json"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n * n}="}) + "\n" for n in range(4)))
    offload = {"zero_optimization": {"offload_param": {"device": "nvme"}}, "zinfer": {"max_weight_memory": "500MB"}}
    config.write_text(json.dumps(offload))
    cached_before = sum(map(cached_bytes, shards))
    command = [sys.executable, "-c", MEASURED_JOB, str(big), str(rows), str(out), str(config)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    print(seen)
    assert seen["rss_growth"] <= 1_200_000_000
    assert seen["homes"]["DISK"] == 17
    assert seen["read"] >= seen["passes"] * seen["disk_bytes_per_pass"] > 2_900_000_000 * seen["passes"]
    assert sum(map(cached_bytes, shards)) - cached_before < 10_000_000, "weights went through the page cache"
    assert seen["written"] < 1_000_000, "something but rows was written"
    written = {path.name for path in tmp_path.iterdir()}
    assert written - {"rows.jsonl", "config.json"} <= {"out.jsonl", "out.jsonl.manifest.json", "out.jsonl.lock"}
    assert len(out.read_text().splitlines()) == 4
