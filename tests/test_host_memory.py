"""Host buffers have the size that was asked for, to the page, pinned or not, and a refused registration is survived."""

import logging
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint
from engines import engine_for
from hypothesis import given
from hypothesis import strategies as st

import zinfer
from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.offload import host_memory, source
from zinfer.offload.block import Block, SlabLayout
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.stream import HostStream


class CopiedRanges(HostStream):
    """Keeps the first and last address of every copy's source."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.ranges.append((source.data_ptr(), source.data_ptr() + source.nbytes - 1))
        super().copy(target, source)


@given(nbytes=st.integers(0, 10**6))
def test_sizes_are_exact_to_the_page_and_addresses_aligned(nbytes: int) -> None:
    buffer = HostBuffer(nbytes, pin=False)
    assert nbytes <= buffer.nbytes < nbytes + 2 * ALIGNMENT_BYTES
    assert buffer.tensor.data_ptr() % ALIGNMENT_BYTES == 0
    assert buffer.memory.nbytes == buffer.tensor.numel() == buffer.nbytes
    buffer.memory[: min(nbytes, 3)] = b"abc"[: min(nbytes, 3)]
    assert bytes(buffer.tensor[: min(nbytes, 3)].tolist()) == b"abc"[: min(nbytes, 3)]
    buffer.close()


def test_memory_is_given_back() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(8):
        buffer = HostBuffer(200_000_000, pin=False)
        buffer.tensor.fill_(1)
        buffer.close()
        del buffer
    assert process.memory_info().rss - before < 100_000_000


@pytest.mark.gpu
def test_pinned_memory_copies_without_blocking_and_is_exact() -> None:
    buffer = HostBuffer(300_000_001, pin=True)
    assert buffer.pinned
    assert buffer.tensor.is_pinned()
    assert buffer.nbytes <= 1.02 * 300_000_001
    buffer.tensor.random_(0, 255)
    assert torch.equal(buffer.tensor.to("cuda").cpu(), buffer.tensor)
    buffer.close()
    assert not buffer.tensor.is_pinned()


@pytest.mark.gpu
def test_a_large_buffer_is_registered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MOST_REGISTERED_BYTES", 1 << 20)
    buffer = HostBuffer(3_500_000, pin=True)
    assert buffer.pinned
    parts = [buffer.tensor[begin : begin + (1 << 20)] for begin in range(0, buffer.nbytes, 1 << 20)]
    assert len(parts) == 4
    assert all(part.is_pinned() for part in parts)
    buffer.close()
    assert not any(part.is_pinned() for part in parts)


@pytest.mark.parametrize("nbytes", [1, 4096, 40960, 41000])
def test_no_copy_crosses_two_registrations(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(source, "MOST_REGISTERED_BYTES", 8192)
    block = Block(0, "block", SlabLayout.pack([("bytes", torch.uint8, (nbytes,))]))
    slab, copies = HostBuffer(block.nbytes), CopiedRanges()
    slab.tensor.random_(0, 255)
    moved = source.HostSource(block, slab, part_bytes=None)
    target = torch.zeros(block.nbytes, dtype=torch.uint8)
    for part in range(moved.num_parts):
        moved.send(part, copies, target, None)
    assert torch.equal(target, slab.tensor[: block.nbytes])
    begin = slab.tensor.data_ptr()
    assert all((first - begin) // 8192 == (last - begin) // 8192 for first, last in copies.ranges)


@pytest.mark.gpu
def test_a_refused_registration_leaves_the_memory_pageable_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    buffer = HostBuffer(1 << 20, pin=True)
    with caplog.at_level(logging.WARNING):
        assert not buffer._register(0, buffer.nbytes), "the second registration of the same memory is refused"
    assert "pinning 1048576 bytes of host memory failed" in caplog.text
    assert "max_pinned_memory" in caplog.text
    assert torch.ones(4, device="cuda").sum().item() == 4, "the refused call's error must not surface later"
    buffer.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("pinning", "expected"), [({"pin_memory": False}, "staging"), ({}, "all")])
def test_pin_memory_false_pins_the_staging_slots_only(
    tmp_path: Path, device: str, pinning: dict[str, bool], expected: str
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    input_ids, attention_mask = left_padded(random_prompts(3))
    with engine_for(folder, "resident", 2, device) as engine:
        logits = engine(input_ids=input_ids, attention_mask=attention_mask).logits
        assert engine.stats().pinned_bytes == 0
    offload = {"offload_param": {"device": "cpu", **pinning}}
    engine = zinfer.init_inference(folder, {"zero_optimization": offload, "zinfer": {"device": device}})
    for _ in range(3):
        assert torch.equal(engine(input_ids=input_ids, attention_mask=attention_mask).logits, logits)
    stats, plan = engine.stats(), engine.plan
    engine.destroy()
    assert stats.blocks_by_home["HOST"] == 5
    if device == "cpu":
        assert stats.pinned_bytes == plan.pinned_bytes == 0
    elif expected == "staging":
        assert plan.num_staging >= 2
        assert plan.pinned_bytes == plan.num_staging * plan.staging_bytes
        assert stats.pinned_bytes <= 1.02 * plan.pinned_bytes
    else:
        loading_bytes = plan.num_staging * plan.staging_bytes  # given back before the first pass
        assert stats.pinned_bytes == plan.pinned_bytes - loading_bytes
        assert plan.streamed_bytes <= stats.pinned_bytes < plan.streamed_bytes + 5 * ALIGNMENT_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("homes", ["host", "disk", "mixed"])
def test_the_plan_says_what_the_device_holds(tmp_path: Path, homes: str) -> None:
    folder = tiny_checkpoint("opt", tmp_path / "model", num_layers=7)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with engine_for(folder, homes, 3, "cuda") as engine:
        taken = torch.cuda.memory_allocated() - before
        assert engine.stats().device_bytes == engine.plan.device_bytes
        assert engine.plan.device_bytes <= taken <= engine.plan.device_bytes + 100 * 512  # the allocator's rounding
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 512
