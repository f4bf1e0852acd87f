"""Sizes that nobody stated: pages take what nothing else needs, and weights beside them fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_support import CONFIGS, machine_with, outline_of, write_config

from zinfer.config import resolve_settings
from zinfer.errors import PlanError
from zinfer.model.outline import Outline, read_outline
from zinfer.offload.block import Tier
from zinfer.planning.kv_budget import BatchingBudget, WeightSizes, find_budget
from zinfer.planning.memory import beside_request
from zinfer.planning.placement import Plan, make_plan
from zinfer.planning.presets import PRESETS, Machine
from zinfer.weights.slab_matrix import most_dequantized_bytes


def placed(outline: Outline, preset: str | Machine, **config: Any) -> tuple[BatchingBudget, Plan, int]:
    """What an `LLM` would make of a machine: its sizes, the homes beside them, and the device's free bytes."""
    machine, settings = PRESETS[preset] if isinstance(preset, str) else preset, resolve_settings(config)
    free_bytes = machine.device_memory_bytes
    weights, most = WeightSizes.of(outline.blocks), outline.max_positions
    budget = find_budget(outline.spec, outline.dtype, weights, settings, machine.limits, free_bytes, most)
    blocks = [block.block for block in outline.blocks]
    taken = budget.footprint
    taken = replace(taken, activation_bytes=taken.activation_bytes + most_dequantized_bytes(blocks))
    limits = beside_request(machine.limits, free_bytes, settings, taken)
    return budget, make_plan(blocks, outline.layers, limits, settings), free_bytes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CONFIGS)
def test_beside_weights_that_stream_pages_take_nearly_all(name: str, tmp_path: Path) -> None:
    outline = outline_of(write_config(tmp_path, CONFIGS[name]))
    budget, plan, free_bytes = placed(outline, "h200")
    assert plan.num_blocks(Tier.DEVICE) < len(outline.blocks)
    streamed_through = plan.num_slots * plan.slot_bytes
    outer_bytes = sum(block.block.nbytes for block in outline.blocks if not block.is_layer)
    # A slot more than the plan has, 0.8 GB and 3 % are kept back.
    left = budget.footprint.nbytes + streamed_through + plan.slot_bytes + outer_bytes + 0.04 * free_bytes + 8e8
    assert left >= free_bytes or budget.num_pages == 1024 * -(-(outline.max_positions or 0) // 64)
    assert budget.max_sequences == 1024


def test_weights_that_leave_room_stay_and_pages_have_the_rest(tmp_path: Path) -> None:
    config = {**CONFIGS["Llama-3-70B"], "num_hidden_layers": 20}
    outline = outline_of(write_config(tmp_path, config))
    budget, plan, free_bytes = placed(outline, "h200")
    assert plan.num_blocks(Tier.DEVICE) == len(outline.blocks)
    assert budget.footprint.kv_bytes + plan.device_bytes > 0.9 * free_bytes
    # The same weights on the host because that was asked for: pages have their place too.
    hosted, plan, _ = placed(outline, "h200", zero_optimization={"offload_param": {"device": "cpu"}})
    assert plan.num_blocks(Tier.HOST) == 20
    assert hosted.footprint.kv_bytes > 1.2 * budget.footprint.kv_bytes


def test_passes_over_layers_from_disk_carry_more(tmp_path: Path) -> None:
    outline = outline_of(write_config(tmp_path, CONFIGS["Llama-3-70B"]))
    hosted, plan, _ = placed(outline, "h200")
    assert (hosted.tokens_per_pass, plan.num_blocks(Tier.DISK)) == (16_384, 0)
    assert hosted.most_part_tokens == 16_384
    budget, plan, free_bytes = placed(outline, "h200", zero_optimization={"offload_param": {"device": "nvme"}})
    assert (budget.tokens_per_pass, budget.max_sequences) == (131_072, 1024)
    assert plan.num_blocks(Tier.DISK) == 80
    assert budget.footprint.activation_bytes <= free_bytes / 8
    small_host = machine_with(140 * 10**9, 10**9)
    assert placed(outline, small_host)[0].tokens_per_pass == 131_072, "the host holds next to nothing"
    beside_pages, plan, _ = placed(outline, machine_with(140 * 10**9, 100 * 10**9))
    assert (beside_pages.tokens_per_pass, plan.num_blocks(Tier.DISK)) == (131_072, 22), "pages take the device"


def test_what_is_stated_for_weights_or_slots_is_left_to_them(tmp_path: Path) -> None:
    outline = outline_of(write_config(tmp_path, {**CONFIGS["Llama-3-70B"], "max_position_embeddings": 131072}))
    usual, _, _ = placed(outline, "h200")
    stated, plan, _ = placed(outline, "h200", zinfer={"max_weight_memory": "60GB"})
    assert stated.footprint.kv_bytes < usual.footprint.kv_bytes - 40e9
    assert 50e9 < plan.device_bytes <= 60e9
    _, plan, _ = placed(outline, "h200", zinfer={"num_slots": 8})
    assert plan.num_slots == 8


def test_a_card_that_is_too_small_is_refused(tmp_path: Path) -> None:
    outline = outline_of(write_config(tmp_path, CONFIGS["Llama-3.1-405B"]))
    machine = PRESETS["a6000"]
    assert machine.device_memory_bytes < 60e9
    budget, plan, free_bytes = placed(outline, "a6000")
    assert budget.footprint.nbytes + plan.device_bytes <= free_bytes
    with pytest.raises(PlanError):
        placed(outline, "a6000", zinfer={"kv_cache_memory": "44GB"})


LLAMA_8B = {
    **CONFIGS["Llama-3-70B"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("free_gb", [8, 12, 24, 48, 80])
@pytest.mark.parametrize(
    "stated", [{}, {"max_weight_memory": "2.5GB"}, {"num_slots": 6}, {"max_weight_memory": "3GB", "num_slots": 2}]
)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_cards_of_all_sizes_take_a_model(
    free_gb: int, stated: dict[str, Any], bits: int | None, tmp_path: Path
) -> None:
    quantization = resolve_settings({"zinfer": {"quantization": {"bits": bits}}} if bits else {}).quantization
    outline = read_outline(write_config(tmp_path, LLAMA_8B), quantization=quantization)
    config = {**stated, **({"quantization": {"bits": bits}} if bits else {})}
    budget, plan, free_bytes = placed(outline, machine_with(free_gb * 10**9, 10**11), zinfer=config)
    assert budget.footprint.nbytes + plan.device_bytes <= free_bytes
    if free_gb >= 24 and "max_weight_memory" not in stated:
        num_resident = plan.num_blocks(Tier.DEVICE)
        assert num_resident == len(outline.blocks) or num_resident <= 5, "all layers stay, or next to none"


def test_parts_are_as_large_as_a_card_has_room_for(tmp_path: Path) -> None:
    """Fewer parts are fewer times that a matrix is dequantized; a small card's memory is for pages."""
    outline = outline_of(write_config(tmp_path, LLAMA_8B))
    sizes = [placed(outline, machine_with(free_gb * 10**9, 10**11))[0].most_part_tokens for free_gb in (8, 20, 40, 140)]
    assert sizes == sorted(sizes)
    assert sizes[1] == 4096
    assert sizes[-2:] == [8192, 16_384]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("free_gb", "num_tokens"), [(6, 1024), (20, 8192), (1000, 16_384)])
def test_activations_fit_a_cpu_whose_memory_is_scarce(free_gb: int, num_tokens: int, tmp_path: Path) -> None:
    """Under a control group's limit, for instance, which leaves less than the usual sizes take."""
    outline = outline_of(write_config(tmp_path, LLAMA_8B))
    machine = machine_with(free_gb * 10**9, 10**11)
    cpu = replace(machine, limits=replace(machine.limits, device=torch.device("cpu")))
    budget, plan, free_bytes = placed(outline, cpu)
    assert budget.tokens_per_pass == num_tokens
    assert budget.footprint.nbytes + plan.device_bytes <= free_bytes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("free_gb", [8, 12, 24, 48, 80])
@pytest.mark.parametrize("device", [None, "cpu", "nvme"])
def test_pages_in_host_memory_fit_beside_weights_whatever_the_card(
    free_gb: int, device: str | None, tmp_path: Path
) -> None:
    outline = outline_of(write_config(tmp_path, LLAMA_8B))
    machine = machine_with(free_gb * 10**9, 64 * 10**9)
    offload = {"zero_optimization": {"offload_param": {"device": device}}} if device else {}
    budget, plan, free_bytes = placed(outline, machine, zinfer={"kv_cache_tier": "host"}, **offload)
    assert budget.is_hosted
    assert not budget.lends
    assert budget.footprint.nbytes + plan.device_bytes <= free_bytes
    assert budget.footprint.kv_bytes == budget.kv_bytes // 32 * 3, "three slots for 32 layers"
    assert budget.kv_bytes + plan.host_bytes <= 64 * 10**9
    assert budget.kv_bytes + plan.pinned_bytes <= 64 * 10**9
    if free_gb <= 12:
        on_device, _, _ = placed(outline, machine, **offload)
        assert budget.num_pages > 4 * on_device.num_pages


def test_stated_pages_in_host_memory_leave_weights_the_rest(tmp_path: Path) -> None:
    outline = outline_of(write_config(tmp_path, CONFIGS["Llama-3-70B"]))
    machine = machine_with(24 * 10**9, 200 * 10**9)
    for stated, num_on_disk in (("50GB", False), ("100GB", True)):
        budget, plan, _ = placed(outline, machine, zinfer={"kv_cache_tier": "host", "kv_cache_memory": stated})
        assert (plan.num_blocks(Tier.DISK) > 0) == num_on_disk
        assert budget.kv_bytes + plan.host_bytes <= 200 * 10**9
    with pytest.raises(PlanError, match="device memory"):  # slots of a layer's pages that no card of 24 GB has
        placed(outline, machine_with(24 * 10**9, 10**12), zinfer={"kv_cache_tier": "host", "kv_cache_memory": "700GB"})
