"""Predicted seconds are the design's arithmetic, term by term, by hand-computed values."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from plan_support import SMALL_LLAMA, machine_with, outline_of, rates, write_config
from transformers import AutoConfig

from zinfer.config import Offload, Settings, resolve_settings
from zinfer.model.outline import Outline, read_outline
from zinfer.model.spec import ModelSpec
from zinfer.offload.block import Block, Extent, Home, SlabLayout, Tier
from zinfer.planning.block_work import BlockWork, between_bytes, find_work
from zinfer.planning.memory import Footprint, Request
from zinfer.planning.placement import Plan
from zinfer.planning.plan import Case, plan_batch
from zinfer.planning.presets import PRESETS
from zinfer.planning.step_time import PassClock, Prediction
from zinfer.probe.rates import Rates

NUM_BLOCKS = 4
NUM_PARAMS = 1 << 20
BLOCK_BYTES = 2 * NUM_PARAMS
REQUEST = Request(batch_size=8, prompt_len=16, new_tokens=5)
FOOTPRINT = Footprint(kv_bytes=9_000_000, activation_bytes=1, decode_kv_bytes=6_000_000)


def block(index: int, dtype: torch.dtype = torch.bfloat16, file_dtype: torch.dtype = torch.bfloat16) -> Block:
    layout = SlabLayout.pack([("weight", dtype, (1024, 1024))])
    extent = Extent(Path("model.safetensors"), 8, NUM_PARAMS * file_dtype.itemsize, file_dtype, 0, dtype)
    return Block(index, f"layers.{index}", layout, (extent,))


def work(index: int, **changed: object) -> BlockWork:
    one = BlockWork(block(index), 1, NUM_PARAMS, every_token=True)
    return replace(one, **changed)  # type: ignore[arg-type]


def plan(*homes: Home, pinned_bytes: int = 4096) -> Plan:
    streamed = sum(home.tier is not Tier.DEVICE for home in homes)
    return Plan(homes, 2, BLOCK_BYTES, 2, 8192, 0, 0, pinned_bytes, streamed * BLOCK_BYTES)


def predict(
    homes: Plan, each: Sequence[BlockWork], speeds: Rates, request: Request, footprint: Footprint
) -> Prediction:
    return PassClock(homes, each, speeds).predict(request, footprint)


WORK = [work(index) for index in range(NUM_BLOCKS)]
PINNED, PAGEABLE, DISK, RESIDENT = Home(Tier.HOST, True), Home(Tier.HOST), Home(Tier.DISK), Home(Tier.DEVICE)


def test_the_link_takes_what_is_streamed_once_a_pass() -> None:
    prediction = predict(plan(PINNED, PINNED, PINNED, RESIDENT), WORK, rates(), REQUEST, FOOTPRINT)
    assert prediction.decode.link_s == pytest.approx(3 * BLOCK_BYTES / 10e9, rel=1e-9)
    assert prediction.decode.seconds == prediction.decode.link_s == prediction.prefill.link_s
    assert prediction.decode.bottleneck == "link"
    assert prediction.decode.disk_s == prediction.decode.host_s == 0


def test_the_disk_takes_the_blocks_that_live_there() -> None:
    prediction = predict(plan(DISK, PINNED, DISK, RESIDENT), WORK, rates(), REQUEST, FOOTPRINT)
    assert prediction.decode.disk_s == pytest.approx(2 * BLOCK_BYTES / 2e9, rel=1e-9)
    assert prediction.decode.link_s == pytest.approx(3 * BLOCK_BYTES / 10e9, rel=1e-9)
    assert prediction.decode.bottleneck == "disk"


def test_a_block_that_is_cast_crosses_as_the_file_has_it() -> None:
    wide = work(0, block=block(0, torch.bfloat16, torch.float32))
    prediction = predict(plan(DISK, RESIDENT), [wide, work(1)], rates(), REQUEST, FOOTPRINT)
    assert prediction.decode.disk_s == pytest.approx(4 * NUM_PARAMS / 2e9, rel=1e-9)
    assert prediction.decode.link_s == pytest.approx(4 * NUM_PARAMS / 10e9, rel=1e-9)
    hosted = predict(plan(PINNED, RESIDENT), [wide, work(1)], rates(), REQUEST, FOOTPRINT)
    assert hosted.decode.link_s == pytest.approx(2 * NUM_PARAMS / 10e9, rel=1e-9)


def test_pageable_blocks_are_copied_on_the_host_first() -> None:
    prediction = predict(plan(PAGEABLE, PINNED, PAGEABLE, RESIDENT), WORK, rates(), REQUEST, FOOTPRINT)
    assert prediction.decode.host_s == pytest.approx(2 * BLOCK_BYTES / 5e9, rel=1e-9)
    assert prediction.decode.bottleneck == "host copies"
    without_staging = plan(PAGEABLE, PAGEABLE, PAGEABLE, RESIDENT, pinned_bytes=0)
    assert predict(without_staging, WORK, rates(), REQUEST, FOOTPRINT).decode.host_s == 0


def test_matrix_work_grows_with_the_tokens() -> None:
    slow = rates(flops_per_s=1e9)
    prediction = predict(plan(*[RESIDENT] * 4), WORK, slow, REQUEST, FOOTPRINT)
    assert prediction.prefill.matrix_s == pytest.approx(2 * 4 * NUM_PARAMS * 8 * 16 / 1e9, rel=1e-9)
    assert prediction.decode.matrix_s == pytest.approx(2 * 4 * NUM_PARAMS * 8 / 1e9, rel=1e-9)
    assert prediction.prefill.num_tokens == 128
    assert prediction.prefill.bottleneck == prediction.decode.bottleneck == "matrix work"


def test_experts_multiply_a_share_and_the_head_one_position_a_row() -> None:
    active = NUM_PARAMS // 2 + NUM_PARAMS // 8
    experts = work(0, active_params=active)
    head = work(1, every_token=False)
    prediction = predict(plan(PINNED, PINNED), [experts, head], rates(flops_per_s=1e9), REQUEST, FOOTPRINT)
    assert prediction.prefill.matrix_s == pytest.approx(2 * (active * 128 + NUM_PARAMS * 8) / 1e9, rel=1e-9)
    assert prediction.decode.matrix_s == pytest.approx(2 * (active + NUM_PARAMS) * 8 / 1e9, rel=1e-9)


def test_device_memory_reads_weights_and_the_cache() -> None:
    slow = rates(device_bytes_per_s=1e6)
    prediction = predict(plan(*[RESIDENT] * 4), WORK, slow, REQUEST, FOOTPRINT)
    assert prediction.prefill.device_s == pytest.approx(4 * BLOCK_BYTES / 1e6, rel=1e-9)
    assert prediction.decode.device_s == pytest.approx((4 * BLOCK_BYTES + 3 * 6_000_000) / 1e6, rel=1e-9)
    assert prediction.decode.bottleneck == "device memory"


def test_a_request_is_one_prefill_and_a_decode_pass_for_each_further_token() -> None:
    prediction = predict(plan(*[PINNED] * 4), WORK, rates(flops_per_s=1e11), REQUEST, FOOTPRINT)
    assert prediction.prefill.seconds > prediction.decode.seconds
    seconds = prediction.prefill.seconds + 4 * prediction.decode.seconds
    assert prediction.seconds == pytest.approx(seconds, rel=1e-12)
    assert prediction.tokens_per_s == pytest.approx(8 * 5 / seconds, rel=1e-12)


@pytest.mark.parametrize("num_blocks", [1, 4, 40])
def test_13500_tokens_are_free_on_an_h200(num_blocks: int) -> None:
    """790e12 * 2 bytes / (55.5e9 * 2 operations) for two-byte weights, 14,234, less what products lose to copies."""
    whole = [work(index) for index in range(num_blocks)]
    prediction = predict(plan(*[PINNED] * num_blocks), whole, PRESETS["h200"].rates, REQUEST, FOOTPRINT)
    assert prediction.free_tokens == int(14_234.23 * (1 - 4 * 55.5e9 / 4.1e12))
    assert "13,500 tokens a pass are free" in str(prediction)


def test_free_tokens_are_where_matrix_work_overtakes_the_transfers() -> None:
    homes = plan(PINNED, PINNED, RESIDENT, RESIDENT)
    prediction = predict(homes, WORK, rates(), REQUEST, FOOTPRINT)
    assert prediction.free_tokens == 4_800  # half of 100e12 * 2 / (10e9 * 2), less 4 % that products lose to copies
    no_cache = replace(FOOTPRINT, decode_kv_bytes=0)
    for num_tokens, bottleneck in ((4_799, "link"), (4_801, "matrix work")):
        assert predict(homes, WORK, rates(), Request(num_tokens, 1, 2), no_cache).decode.bottleneck == bottleneck
    assert predict(plan(*[RESIDENT] * 4), WORK, rates(), REQUEST, FOOTPRINT).free_tokens == 0


def test_it_reads_as_one_line() -> None:
    line = str(predict(plan(*[DISK] * 4), WORK, rates(disk_bytes_per_s=31.4e6), REQUEST, FOOTPRINT))
    assert line == "267 ms a pass (disk), 29.9 tokens/s, 3,180,000 tokens a pass are free"


@pytest.mark.parametrize("tie", [True, False])
def test_a_tied_head_crosses_twice_and_multiplies_once(tie: bool, tmp_path: Path) -> None:
    outline = read_outline(tiny_checkpoint("llama", tmp_path, tie=tie))
    outer = [each for each in find_work(outline.blocks, outline.spec) if not each.every_token]
    by_name = {each.block.name: (each.num_uses, each.active_params) for each in outer}
    embedding = 131 * 64
    if tie:
        assert by_name == {"model.embed_tokens": (2, embedding), "model.norm": (1, 64)}
    else:
        untied = {"model.embed_tokens": (1, 0), "model.norm": (1, 64), "lm_head": (1, embedding)}
        assert by_name == untied
    all_streamed = plan(*[PINNED] * len(outline.blocks))
    link_s = predict(all_streamed, find_work(outline.blocks, outline.spec), rates(), REQUEST, FOOTPRINT).decode.link_s
    assert link_s * 10e9 == pytest.approx(outline.nbytes + (4 * embedding if tie else 0), abs=1)


@pytest.fixture
def outline(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    return outline_of(write_config(tmp_path_factory.getbasetemp() / "small-llama", SMALL_LLAMA))


def test_a_real_plan_that_the_link_bounds(outline: Outline) -> None:
    settings = Settings(offload=Offload(device="cpu"))
    forecast = plan_batch(Case(outline, machine_with(2_000_000_000, 2_000_000_000), settings), REQUEST)
    assert forecast.plan.num_blocks(Tier.HOST) == 14
    assert forecast.prediction.decode.bottleneck == "link"
    assert forecast.prediction.decode.seconds == pytest.approx(forecast.plan.streamed_bytes / 10e9, rel=1e-9)


def test_a_real_plan_that_the_disk_bounds(outline: Outline) -> None:
    settings = Settings(offload=Offload(device="nvme"))
    forecast = plan_batch(Case(outline, machine_with(2_000_000_000, 2_000_000_000), settings), REQUEST)
    assert forecast.plan.num_blocks(Tier.DISK) == 14
    assert forecast.prediction.decode.bottleneck == "disk"
    assert forecast.prediction.decode.seconds == pytest.approx(forecast.plan.streamed_bytes / 2e9, rel=1e-9)


def test_blocks_that_stay_in_lent_memory_do_not_pass() -> None:
    homes = plan(PINNED, RESIDENT, DISK, PINNED)
    found = [
        PassClock(homes, WORK, rates()).pass_time(1, 1, cache_bytes=0, lent_bytes=count * BLOCK_BYTES + 1)
        for count in range(5)
    ]
    assert [each.link_s for each in found] == pytest.approx([count * BLOCK_BYTES / 10e9 for count in (3, 2, 1, 0, 0)])
    assert [each.disk_s > 0 for each in found] == [True, False, False, False, False]


def test_ranks_that_copy_as_they_like_slow_products_and_take_no_turns() -> None:
    """Of two ranks each has half of three blocks on its device, and the whole fourth one."""
    halves, slow = Home(Tier.DEVICE, shared=True), replace(rates(), device_bytes_per_s=1e9, gather_bytes_per_s=12e9)
    homes = replace(plan(halves, halves, RESIDENT, halves), num_ranks=2)
    pulled = [3 * BLOCK_BYTES / 2 - count * BLOCK_BYTES for count in range(2)] + [0, 0]
    joined = replace(slow, gather_bytes_per_s=25e9)
    clock, in_turns = PassClock(homes, WORK, joined), PassClock(homes, WORK, slow)
    assert (clock.num_gathering, in_turns.num_gathering) == (1, 2)
    for count, nbytes in enumerate(pulled):
        found = clock.pass_time(1, 1, cache_bytes=0, lent_bytes=count * BLOCK_BYTES)
        assert found.gather_s == pytest.approx(2 * nbytes / 25e9)
        assert found.between_s == pytest.approx(2 * nbytes / 1e9)
        together = in_turns.pass_time(1, 1, cache_bytes=0, lent_bytes=count * BLOCK_BYTES)
        assert together.gather_s == pytest.approx(3 * BLOCK_BYTES / 12e9 + 3 * 2e-3), "nothing stays"
    resident = PassClock(plan(*[RESIDENT] * 4), WORK, joined).pass_time(1, 1, cache_bytes=0)
    assert (resident.gather_s, resident.between_s) == (0, 0)


def test_norms_that_are_written_out_in_python_move_more() -> None:
    shape = ModelSpec.read(AutoConfig.for_model("llama", hidden_size=64, intermediate_size=128, num_attention_heads=4))
    assert shape.has_rms_norms
    assert shape.rotated == 128
    layer = work(0, between_bytes=between_bytes(shape, 2))
    plain = work(0, between_bytes=between_bytes(replace(shape, has_rms_norms=False), 2))
    homes = plan(RESIDENT)
    longer, shorter = (PassClock(homes, [each], rates()).pass_time(10**6, 1, cache_bytes=0) for each in (layer, plain))
    more_bytes = 2 * 64 * (53 - 4) + 2 * 128 * (5 - 2)  # and a gate
    assert longer.seconds - shorter.seconds == pytest.approx(10**6 * more_bytes / rates().device_bytes_per_s)
    fused = between_bytes(replace(shape, is_fused=True), 2)
    assert fused == between_bytes(shape, 2) - 2 * 64 * (53 - 4) - 2 * 128 * (40 - 2) - 2 * 128 * (5 - 3)


def test_quantized_matrices_are_dequantized_for_each_part_of_many_tokens(tmp_path: Path) -> None:
    folder = write_config(tmp_path, SMALL_LLAMA)
    found = {}
    configs: list[dict[str, Any] | None] = [{"bits": 8}, {"bits": 8, "activations": True}, None]
    for config in configs:
        quantization = resolve_settings({"zinfer": {"quantization": config}}).quantization if config else None
        outline = read_outline(folder, quantization=quantization)
        layers = [each for each in find_work(outline.blocks, outline.spec) if each.every_token]
        homes = plan(*[RESIDENT] * len(layers))
        found[str(config)] = [
            PassClock(homes, layers, rates()).pass_time(tokens, 1, cache_bytes=0, num_parts=parts).between_s
            for tokens, parts in ((100, 1), (10**6, 1), (10**6, 3))
        ]
    plain, quantized, activations = found["None"], found["{'bits': 8}"], found["{'bits': 8, 'activations': True}"]
    assert plain == activations
    assert plain[0] == quantized[0], "few tokens are multiplied with the codes"
    assert plain[1] == plain[2]
    once_s, thrice_s = quantized[1] - plain[1], quantized[2] - plain[2]
    assert thrice_s == pytest.approx(3 * once_s)
    matrices = 14 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024)
    assert once_s == pytest.approx(3 * matrices / rates().device_bytes_per_s, rel=0.05)


def test_a_head_is_dequantized_once_for_many_rows() -> None:
    head = replace(work(0), every_token=False, dequantized_bytes=10**9)
    found = [
        PassClock(plan(RESIDENT), [head], rates()).pass_time(10**6, num_rows, cache_bytes=0, num_parts=8).between_s
        for num_rows in (1, 1024)
    ]
    assert found == [0, pytest.approx(10**9 / rates().device_bytes_per_s)]


def test_reading_the_cache_does_not_overlap_with_products() -> None:
    homes, cache_bytes = plan(*[RESIDENT] * NUM_BLOCKS), 10**9
    bare, full = (
        PassClock(homes, WORK, rates()).pass_time(10**6, 1, cache_bytes=nbytes) for nbytes in (0, cache_bytes)
    )
    assert bare.bottleneck == "matrix work"
    assert full.seconds == pytest.approx(bare.seconds + cache_bytes / rates().device_bytes_per_s)


@pytest.mark.parametrize("shares_host", [False, True])
def test_python_launches_layers_beside_a_gpu_and_before_a_cpu(shares_host: bool) -> None:
    layers = [replace(each, has_experts=index == 0) for index, each in enumerate(WORK)]
    slow, resident = rates(launch_s=1.0, shares_host=shares_host), plan(*[RESIDENT] * NUM_BLOCKS)
    clock = PassClock(resident, layers, slow)
    launched, in_parts, replayed = (
        clock.pass_time(100, 1, cache_bytes=0, num_parts=parts, is_replayed=is_replayed)
        for parts, is_replayed in ((1, False), (2, False), (1, True))
    )
    alone = PassClock(resident, layers, rates()).pass_time(100, 1, cache_bytes=0)
    assert launched.bottleneck == "Python launching"
    assert launched.seconds == launched.launch_s + (alone.terms["matrix work"] if shares_host else 0)
    assert in_parts.launch_s - launched.launch_s == launched.launch_s - replayed.launch_s > 0, "each part of each layer"
    plain = PassClock(resident, WORK, slow).pass_time(100, 1, cache_bytes=0)
    assert launched.launch_s > plain.launch_s, "experts are launched one after the other"
    fast = PassClock(resident, layers, replace(slow, launch_s=1e-12)).pass_time(10**6, 1, cache_bytes=0)
    assert fast.bottleneck == "matrix work"
