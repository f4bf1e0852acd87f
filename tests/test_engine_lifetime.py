"""From making to destroying: no thread, file or memory is left behind, and no answer comes after."""

import ctypes
import gc
import mmap
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model
from engine_support import PROMPT, eager, folder, greedy
from engines import HOMES, config_for
from safetensors.torch import save_file
from threads import open_descriptors, settled_threads
from transformers import PreTrainedModel

import zinfer

__all__ = ["eager", "folder"]  # fixtures


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", HOMES)
def test_destroy_leaves_no_thread_and_no_file(folder: Path, homes: str) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    engine = zinfer.init_inference(folder, config_for(folder, homes, 3, "cpu"))
    greedy(engine)
    engine.destroy()
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() == descriptors
    engine.destroy()
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("homes", ["host", "disk"])
def test_destroy_before_the_first_use(folder: Path, homes: str) -> None:
    threads = set(threading.enumerate())
    zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu")).destroy()
    assert set(threading.enumerate()) <= threads


def test_destroy_while_another_thread_generates(folder: Path, eager: PreTrainedModel) -> None:
    """It waits for the call, or the call fails with a clear error; it never frees what is read."""
    engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(greedy(engine, max_new_tokens=60))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    engine.destroy()
    thread.join(30)
    assert outcome
    if isinstance(outcome[0], Exception):
        assert "destroyed" in str(outcome[0])
    else:
        assert torch.equal(outcome[0], greedy(eager, max_new_tokens=60))  # type: ignore[arg-type]


@pytest.mark.parametrize("homes", HOMES)
def test_use_after_destroy_is_an_error(folder: Path, homes: str) -> None:
    engine = zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    module = engine.module
    greedy(engine)
    engine.destroy()
    for use in (lambda: greedy(engine), lambda: engine(PROMPT), lambda: engine.forward(PROMPT)):
        with pytest.raises(RuntimeError, match=r"destroyed.*zinfer\.init_inference"):
            use()
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("homes", HOMES)
def test_the_module_of_a_destroyed_engine_answers_nothing(folder: Path, homes: str) -> None:
    """A name kept for `engine.module` must not answer from memory that was given back."""
    engine = zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    module = engine.module
    engine.destroy()
    with pytest.raises((RuntimeError, NotImplementedError)):
        print(greedy(module))
    with pytest.raises((RuntimeError, NotImplementedError)):
        print(module.lm_head(torch.ones(1, 64)))


def test_twenty_engines_leave_nothing(folder: Path) -> None:
    configs = [config_for(folder, homes, 2, "cpu") for homes in HOMES]
    zinfer.init_inference(folder, configs[0]).destroy()
    threads, descriptors, mapped = settled_threads(), open_descriptors(), len(Path("/proc/self/maps").read_bytes())
    for index in range(20):
        engine = zinfer.init_inference(folder, configs[index % len(configs)])
        engine(PROMPT)
        engine.destroy()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors
    del engine
    gc.collect()
    assert len(Path("/proc/self/maps").read_bytes()) < mapped + 20_000


def test_an_engine_that_is_dropped_is_collected(folder: Path) -> None:
    """Forgetting `destroy` must not keep threads and files for the rest of the process."""
    threads, descriptors = settled_threads(), open_descriptors()
    for _ in range(3):
        engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
        greedy(engine)
        del engine
        gc.collect()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors


@pytest.mark.sampled(4)
@pytest.mark.parametrize("homes", HOMES)
def test_a_module_outlives_its_engine(folder: Path, homes: str) -> None:
    """Scripts write `model = init_inference(...)` and then `model = model.module`."""
    threads, descriptors = settled_threads(), open_descriptors()
    model = zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    expected = greedy(model)
    model = model.module
    gc.collect()
    assert torch.equal(greedy(model), expected)
    zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu")).destroy()
    assert torch.equal(greedy(model), expected)
    del model
    gc.collect()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors


def test_a_dropped_engine_is_cleaned_up_before_the_next_is_made(folder: Path) -> None:
    threads = settled_threads()
    gc.disable()
    try:
        for _ in range(3):
            engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
            greedy(engine)
            own = settled_threads() - threads
            del engine
        last = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
        greedy(last)
        assert settled_threads() - threads == own
        last.destroy()
    finally:
        gc.enable()
    assert settled_threads() == threads


def resident_bytes() -> int:
    """Memory of this process, without what the C library keeps of freed memory for the next allocation."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["resident", "host"])
def test_memory_is_given_back(tmp_path: Path, homes: str) -> None:
    model = tiny_model("llama", num_layers=1)
    model.config.intermediate_size = 60_000
    with torch.device("meta"):
        wide = type(model)(model.config)
    tensors = {
        name: torch.full(parameter.shape, 0.01) for name, parameter in wide.named_parameters(remove_duplicate=False)
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total > 40e6
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors, wide, model
    gc.collect()
    offload = {"zero_optimization": {"offload_param": {"device": "none" if homes == "resident" else "cpu"}}}
    zinfer.init_inference(tmp_path, offload, device="cpu").destroy()
    before = resident_bytes()
    engine = zinfer.init_inference(tmp_path, offload, device="cpu")
    module = engine.module
    engine(PROMPT)
    held = resident_bytes() - before
    assert held > 0.7 * total
    engine.destroy()
    gc.collect()
    assert resident_bytes() - before < 0.2 * total, "while the engine and its module are still referred to"
    assert module is engine.module
