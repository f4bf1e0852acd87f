"""A store runs as its model quantized while loading does, to the bit, from every home; a flipped byte is found."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint, tiny_mixtral
from store_support import blocks_of, make_store, write_module

import zinfer
from zinfer.nvme.reader import DiskReadError

SECTIONS: dict[str, dict[str, object]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group_size": 32, "symmetric": False},
    "fp8": {"bits": 8, "format": "fp8"},
}
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(4, seed=5))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@contextmanager
def engine_of(model: Path, offload: str, device: str, **ours: object) -> Iterator[zinfer.InferenceEngine]:
    config = {"zero_optimization": {"offload_param": {"device": offload}}, "zinfer": {"device": device, **ours}}
    engine = zinfer.init_inference(model, config)
    try:
        yield engine
    finally:
        engine.destroy()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_a_store_computes_what_quantizing_while_loading_does(
    tmp_path: Path, batch: dict[str, torch.Tensor], family: str, name: str, device: str
) -> None:
    folder, store = tiny_checkpoint(family, tmp_path / "model", num_layers=NUM_LAYERS), tmp_path / "store"
    make_store(folder, store, device, **SECTIONS[name])
    with engine_of(folder, "none", device, quantization=SECTIONS[name]) as engine:
        expected = engine(**batch).logits
    for offload, home in (("none", "DEVICE"), ("cpu", "HOST"), ("nvme", "DISK")):
        with engine_of(store, offload, device) as engine:
            assert torch.equal(engine(**batch).logits, expected), home
            assert torch.equal(engine(**batch).logits, expected), home
            assert engine.stats().blocks_by_home[home] >= NUM_LAYERS
            packed = sum(block["num_bytes"] for block in blocks_of(store) if block["name"][-1].isdigit())
            assert engine.stats().disk_bytes_per_pass <= packed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_a_flipped_byte_is_found_and_its_block_named(
    tmp_path: Path, batch: dict[str, torch.Tensor], offload: str
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=3)
    make_store(folder, tmp_path / "store", bits=4)
    path = tmp_path / "store" / blocks_of(tmp_path / "store")[2]["file"]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)

    def run() -> None:
        with engine_of(tmp_path / "store", offload, "cpu") as engine:
            engine(**batch)

    with pytest.raises(DiskReadError, match=r"block model\.layers\.1: its bytes are not those.*zinfer quantize"):
        run()


def test_experts_that_lie_one_below_the_other_come_back_as_they_were(
    tmp_path: Path, batch: dict[str, torch.Tensor]
) -> None:
    folder, store = write_module(tiny_mixtral(), tmp_path / "model"), tmp_path / "store"
    make_store(folder, store, "cpu", bits=4, group_size=32)
    with engine_of(folder, "none", "cpu", quantization={"bits": 4, "group_size": 32}) as engine:
        expected = engine(**batch).logits
    for offload in ("none", "nvme"):
        with engine_of(store, offload, "cpu") as engine:
            assert torch.equal(engine(**batch).logits, expected)
