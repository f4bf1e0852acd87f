"""Memory, descriptors and threads after failures, and after engines that were made and destroyed again and again."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model
from engine_support import PROMPT
from engines import HOMES, config_for, engine_for
from faults_support import Fault, Holdings, failing_reads, failure_of, logits_of, read_error, resident_bytes
from safetensors.torch import save_file

import zinfer
from zinfer.nvme.reader import DiskReadError

NUM_ENGINES = 20
NUM_WARM_UP = 3
GROWTH_BYTES = 8 << 20  # arenas of the allocator; a leak of one staging ring or of the slabs in each engine is more
SPARE_BYTES = 32 << 20  # less than a layer of the large model
EVERYTHING = 10**15


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=7)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 46 MB, so that a leak of either shows in the process's memory."""
    folder = tmp_path_factory.mktemp("large")
    model = tiny_model("llama", num_layers=2)
    model.config.intermediate_size = 60_000
    with torch.device("meta"):
        wide = type(model)(model.config)
    parameters = wide.named_parameters(remove_duplicate=False)
    model.config.save_pretrained(folder)
    save_file({name: torch.full(each.shape, 0.01) for name, each in parameters}, folder / "model.safetensors")
    return folder


def large_config(homes: str, device: str) -> dict[str, object]:
    offload = {"device": {"resident": "none", "host": "cpu", "disk": "nvme"}[homes]}
    budgets = {"device": device, "max_weight_memory": EVERYTHING, "max_host_memory": EVERYTHING}
    return {"zero_optimization": {"offload_param": offload}, "zinfer": budgets}


@pytest.mark.slow
@pytest.mark.parametrize(
    "homes", [home if home == "mixed" else pytest.param(home, marks=pytest.mark.slow) for home in HOMES]
)
def test_twenty_engines_do_not_grow(small: Path, homes: str, device: str) -> None:
    reads = homes in ("disk", "mixed")
    held: list[Holdings] = []
    base_bytes = 0
    for number in range(NUM_ENGINES):
        fault = Fault(armed=False)
        with failing_reads(read_error, fault), engine_for(small, homes, 3, device) as engine:
            logits_of(engine)
            fault.armed = reads and number % 4 == 3  # an engine that fails is no exception
            if fault.armed:
                failure_of(partial(logits_of, engine), fault)
        del engine
        held.append(Holdings.now())
        if number == NUM_WARM_UP:
            base_bytes = resident_bytes()
    assert set(held[NUM_WARM_UP:]) == {held[-1]}
    grown_bytes = resident_bytes() - base_bytes
    print(f"{homes} on {device}: grown by {grown_bytes} bytes")
    assert grown_bytes < GROWTH_BYTES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["resident", "host"])
def test_a_failed_load_gives_its_memory_back(large: Path, homes: str) -> None:
    config = large_config(homes, "cpu")
    zinfer.init_inference(large, config).destroy()
    size_bytes = (large / "model.safetensors").stat().st_size
    before, before_bytes = Holdings.now(), resident_bytes()
    for _ in range(3):
        fault = Fault(num_good=size_bytes // (1 << 20) * 3 // 4)
        with failing_reads(read_error, fault):
            error = failure_of(lambda: zinfer.init_inference(large, config), fault, f"late in loading, {homes}")
        assert isinstance(error, DiskReadError)
        del error
        assert Holdings.now() <= before
    grown_bytes = resident_bytes() - before_bytes
    print(f"{homes}: {grown_bytes} of {size_bytes} bytes are still held")
    assert grown_bytes < size_bytes // 4
    with engine_for(large, "host") as engine:
        assert logits_of(engine).isfinite().all()


@pytest.fixture
def full_device() -> Iterator[Callable[[], None]]:
    """A device with hardly any memory left for this process; others keep theirs. What it gives back makes room."""
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SPARE_BYTES) / total_bytes)
    make_room = partial(torch.cuda.set_per_process_memory_fraction, 1.0)
    yield make_room
    make_room()


@pytest.mark.gpu
@pytest.mark.parametrize("homes", ["resident", "host", "disk"])
def test_a_budget_that_the_device_does_not_have(large: Path, full_device: Callable[[], None], homes: str) -> None:
    """The allocator's own error, at once; with room the same call succeeds."""
    config = large_config(homes, "cuda")
    before = Holdings.now()
    for _ in range(2):
        error = failure_of(lambda: zinfer.init_inference(large, config), label=f"no room on the device, {homes}")
        assert isinstance(error, torch.OutOfMemoryError)
        del error
        gc.collect()
        assert Holdings.now() <= before
    full_device()
    engine = zinfer.init_inference(large, config)
    try:
        assert engine(input_ids=PROMPT).logits.isfinite().all()
    finally:
        engine.destroy()


def test_the_same_configuration_after_a_failure(small: Path, device: str) -> None:
    """Nothing of a failed engine, its plan included, shows in the next one."""
    config = config_for(small, "mixed", 3, device)
    plans = []
    for _ in range(2):
        with failing_reads(read_error, Fault()):
            failure_of(lambda: zinfer.init_inference(small, config))
        engine = zinfer.init_inference(small, config)
        plans.append(str(engine.plan))
        engine.destroy()
    assert plans[0] == plans[1]
