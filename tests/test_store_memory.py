"""Quantizing a checkpoint takes the memory of a few blocks, however large the checkpoint is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import wide_llama
from engines import drop_page_cache

from zinfer.offload.block import NUM_CONVERSION_SLOTS

NUM_LAYERS = 40
MEASURED = """
import json, sys
import psutil
import zinfer.kernels.quantize
import zinfer.store.pipeline
from zinfer.config import resolve_settings
from zinfer.store.writing import write_store

model, output, warm_model, warm_output = sys.argv[1:]
zinfer.store.pipeline._NUM_STAGING, zinfer.store.pipeline._STAGING_BYTES = 4, 1 << 20
zinfer.kernels.quantize._SLICE_ELEMENTS = 1 << 18
settings = resolve_settings({"zinfer": {"device": "cpu", "quantization": {"bits": 4, "group_size": 64}}})
write_store(warm_model, warm_output, settings)
before = psutil.Process().memory_info().rss
open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew (proc(5))
write_store(model, output, settings)
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
print(json.dumps(peak - before))
"""


@pytest.mark.slow
def test_the_memory_is_that_of_a_few_blocks(tmp_path: Path) -> None:
    model = wide_llama(tmp_path / "model", NUM_LAYERS)
    drop_page_cache(model)
    total_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    layer_bytes = total_bytes // NUM_LAYERS
    folders = [model, tmp_path / "store", wide_llama(tmp_path / "warm", 2), tmp_path / "warm_store"]
    command = [sys.executable, "-c", MEASURED, *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    growth_bytes = json.loads(run.stdout.splitlines()[-1])
    packed_bytes = layer_bytes // 6  # 4 bits of 32, scales, norms
    staging_bytes, temporaries_bytes, spare_bytes = 4 << 20, 8 << 20, 24 << 20
    allowed = NUM_CONVERSION_SLOTS * layer_bytes + 2 * packed_bytes + staging_bytes + temporaries_bytes + spare_bytes
    assert growth_bytes <= allowed < total_bytes / 4
