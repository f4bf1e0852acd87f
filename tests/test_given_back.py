"""Memory that is free when `close` and `destroy` return, although objects are still referred to and nothing was
collected: a model that is opened next plans with it."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import HOMES, config_for
from graph_support import stand_in
from llm_support import by_ids, folder, prompts, token_bytes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.planning import kv_budget as budget

__all__ = ["folder", "prompts", "stand_in"]  # fixtures

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
INPUT = torch.tensor([[5, 6, 7, 8]])
HOST = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


class Storages:
    """The memory of the tensors that were made since."""

    def __init__(self) -> None:
        self._before = set(_storages())
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def look(self) -> int:
        """Note what is there now; its bytes."""
        found = {key: storage for key, storage in _storages().items() if key not in self._before}
        self._found |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in found.items()}
        return sum(storage.nbytes() for storage in found.values())

    def left(self, module: nn.Module) -> list[int]:
        """The sizes of those that are alive; buffers are the module's own."""
        own = {buffer.untyped_storage()._cdata for buffer in module.buffers() if not buffer.is_meta}
        return [size for key, (weak, size) in self._found.items() if key not in own and not weak.expired()]


def _storages() -> dict[int, torch.UntypedStorage]:
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
    plain = [each for each in tensors if each.layout == torch.strided and type(each) in (torch.Tensor, nn.Parameter)]
    return {(storage := each.untyped_storage())._cdata: storage for each in plain}


@pytest.fixture
def storages() -> Iterator[Storages]:
    gc.collect()
    gc.disable()  # whatever refers to itself stays
    found = Storages()
    gc.freeze()  # what was there before is looked through once
    try:
        yield found
    finally:
        gc.enable()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(
    ("home", "options"),
    [
        ("none", {}),
        ("cpu", {}),
        ("nvme", {}),
        ("cpu", {"kv_cache_dtype": "int8", "quant": {"enabled": True}, "replace_with_kernel_inject": True}),
    ],
)
def test_of_an_llm(
    folder: Path, prompts: list[list[int]], storages: Storages, home: str, tier: str, options: dict[str, Any]
) -> None:
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    llm = LLM(folder, config, device="cpu", kv_cache_tier=tier, kv_cache_memory="2MB", **options)
    assert storages.look() >= llm.batching.kv_bytes
    llm.generate(by_ids(prompts[:5]), PARAMS)
    stats = llm.stats()
    assert (stats.streamed_bytes_per_pass > 0) == (home != "none")
    assert storages.look() >= llm.batching.kv_bytes + stats.device_bytes
    llm.close()
    assert storages.left(llm._model.module) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.usefixtures("stand_in")
def test_of_an_llm_that_replays_passes(folder: Path, prompts: list[list[int]], storages: Storages, home: str) -> None:
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    llm = LLM(folder, config, device="cpu", enable_cuda_graph=True, kv_cache_memory="2MB")
    llm.generate(by_ids(prompts[:5]), PARAMS)
    assert llm.graphs.replayed > 0
    assert storages.look() >= llm.batching.kv_bytes + llm.stats().device_bytes
    llm.close()
    assert storages.left(llm._model.module) == []
    assert llm.graphs.replayed > 0


def test_of_an_llm_with_texts_parked_on_the_disk(
    folder: Path, storages: Storages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed in the middle, with texts parked in the file, and the stream still referred to."""
    monkeypatch.setattr(budget, "_MOST_PARKED_BYTES", 0)
    config = {"zero_optimization": {"offload_param": {"device": "none", "nvme_path": str(tmp_path)}}}
    sizes = {"kv_page_size": 4, "kv_cache_memory": 24 * 4 * token_bytes(folder)}
    llm = LLM(folder, config, device="cpu", swaps_to_disk=True, **sizes)
    stream = llm.stream(by_ids([[9, 9 + number] for number in range(9)]), SamplingParams(40, ignore_eos=True))
    assert any(llm.num_swapped_pages for _ in stream)
    assert llm.stats().swapped_bytes_written > 0
    assert storages.look() > llm.batching.kv_bytes + (32 << 20), "what passes between pages and file"
    llm.close()
    assert storages.left(llm._model.module) == []
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        list(stream)


def test_of_an_llm_that_has_lent_pages(folder: Path, prompts: list[list[int]], storages: Storages) -> None:
    llm = LLM(folder, HOST, device="cpu", kv_cache_memory="4MB")
    lengths = [SamplingParams(max_new_tokens=4 + 8 * number, ignore_eos=True) for number in range(4)]
    stream = llm.stream(by_ids(prompts[:4]), lengths)
    for _ in range(3):
        next(stream)
    streamer = llm._model._running()._streamer
    assert streamer is not None
    assert streamer._num_borrowed > 0
    storages.look()
    llm.close()
    assert storages.left(llm._model.module) == []
    assert stream is not None


@pytest.mark.parametrize("tier", ["device", "host"])
def test_of_an_llm_whose_pass_failed(
    folder: Path, prompts: list[list[int]], storages: Storages, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Whoever looks at the failure, a notebook for one, keeps every frame of it."""

    def broken(*args: object) -> None:
        raise ValueError("an out of memory, for one")

    llm = LLM(folder, HOST, device="cpu", kv_cache_tier=tier, kv_cache_memory="2MB")
    llm.generate(by_ids(prompts[:1]), PARAMS)
    storages.look()
    llm._model.layers[2].register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="out of memory") as failure:
        llm.generate(by_ids(prompts[:5]), PARAMS)
    llm.close()
    assert storages.left(llm._model.module) == []
    assert failure.value.__traceback__ is not None


@pytest.mark.gpu
@pytest.mark.parametrize("replays", [False, True])
def test_the_device_has_what_an_llm_had_on_it(folder: Path, prompts: list[list[int]], replays: bool) -> None:
    """But for what libraries keep for themselves."""

    def taken() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = taken()
    llm = LLM(folder, device="cuda", enable_cuda_graph=replays, kv_cache_memory="1GB")
    llm.generate(by_ids(prompts), PARAMS)
    assert taken() - before > 9e8
    assert (llm.graphs.replayed > 0) == replays
    llm.close()
    assert taken() - before < 1e8
    assert llm.plan is not None


def test_a_closed_llm_tells_what_was(folder: Path, prompts: list[list[int]]) -> None:
    with LLM(folder, device="cpu", kv_cache_memory="1MB") as llm:
        llm.generate(by_ids(prompts[:5]), PARAMS)
        before = (llm.num_tokens, llm.num_new_tokens, llm.passes(), llm.batching, llm.plan, llm.graphs, llm.fits(9, 9))
        predicted = llm.predict_passes(), llm.predict([5], 4)
    after = (llm.num_tokens, llm.num_new_tokens, llm.passes(), llm.batching, llm.plan, llm.graphs, llm.fits(9, 9))
    assert after == before
    assert (llm.predict_passes(), llm.predict([5], 4)) == predicted
    assert (llm.num_running, llm.num_swapped_pages) == (0, 0)
    llm.close()
    for use in (llm.stats, llm.reset_prefix_cache, lambda: llm.generate(by_ids(prompts))):
        with pytest.raises(RuntimeError, match="this LLM was closed; make a new one"):
            use()


@pytest.mark.parametrize("homes", HOMES)
def test_of_an_engine(folder: Path, storages: Storages, homes: str) -> None:
    engine = zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    engine.generate(INPUT, max_new_tokens=6, do_sample=False)
    assert storages.look() >= engine.stats().device_bytes
    engine.destroy()
    assert storages.left(engine.module) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [None, HOST])
@pytest.mark.usefixtures("stand_in")
def test_of_an_engine_that_replays_forwards(folder: Path, storages: Storages, config: Any) -> None:
    options = {"enable_cuda_graph": True, "replace_with_kernel_inject": True}
    engine = zinfer.init_inference(folder, config, device="cpu", **options)
    for _ in range(2):
        engine.generate(INPUT, max_new_tokens=6, do_sample=False)
    assert engine.graphs.replayed > 0
    storages.look()
    engine.destroy()
    assert storages.left(engine.module) == []


def test_of_an_engine_whose_forward_failed(folder: Path, storages: Storages) -> None:
    def broken(*args: object) -> None:
        raise ValueError("an out of memory, for one")

    engine = zinfer.init_inference(folder, config_for(folder, "mixed", 2, "cpu"))
    engine(INPUT)
    storages.look()
    engine.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="out of memory") as failure:
        engine(INPUT)
    engine.destroy()
    assert storages.left(engine.module) == []
    assert failure.value.__traceback__ is not None
