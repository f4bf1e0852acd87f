"""Quantizing while loading takes the memory of the quantized model and two full blocks, whatever the model has."""

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
import zinfer
import zinfer.kernels.quantize

zinfer.kernels.quantize._SLICE_ELEMENTS = 1 << 18
offload = {"device": "cpu", "buffer_count": 4, "buffer_size": 1 << 18}
config = {"zero_optimization": {"offload_param": offload}}
config["zinfer"] = {"device": "cpu", "quantization": {"bits": 4, "group_size": 64}}
model, warm_model = sys.argv[1:]
zinfer.init_inference(warm_model, config).destroy()
before = psutil.Process().memory_info().rss
open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew (proc(5))
engine = zinfer.init_inference(model, config)
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
stats = engine.stats()
print(json.dumps({"growth": peak - before, "host": stats.host_bytes, "homes": stats.blocks_by_home}))
"""


@pytest.mark.slow
def test_the_peak_is_the_quantized_model_and_two_blocks(tmp_path: Path) -> None:
    model = wide_llama(tmp_path / "model", NUM_LAYERS)
    drop_page_cache(model)
    total_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    layer_bytes = total_bytes // NUM_LAYERS
    command = [sys.executable, "-c", MEASURED, str(model), str(wide_llama(tmp_path / "warm", 2))]
    # What is larger goes back to the system when it is freed; a real model's blocks always are (mallopt(3)).
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["homes"]["HOST"] == NUM_LAYERS
    packed_bytes = total_bytes // 6  # 4 bits of 32, scales, norms
    assert found["host"] < packed_bytes + (8 << 20)
    temporaries_bytes, spare_bytes = 8 << 20, 24 << 20
    most_bytes = found["host"] + NUM_CONVERSION_SLOTS * layer_bytes + temporaries_bytes + spare_bytes
    assert found["growth"] < most_bytes < total_bytes / 2
