"""DeepSpeed's placement and prefetch keys decide homes and slots as far as the budgets hold."""

from pathlib import Path

import pytest
import torch
from budget_support import NUM_LAYERS, batch, expected, folder, layer_bytes, offload, plan_of, total_bytes, zero
from checkpoints import tiny_model
from engines import blocks_of, loaded

from zinfer.errors import ZinferError
from zinfer.offload.block import Tier
from zinfer.planning.placement import Plan

__all__ = ["batch", "expected", "folder", "layer_bytes", "total_bytes"]  # fixtures


def test_offload_param_decides_the_homes(folder: Path) -> None:
    free = plan_of(folder)
    none = plan_of(folder, offload("none"))
    cpu = plan_of(folder, offload("cpu"))
    nvme = plan_of(folder, offload("nvme", nvme_path="/tmp"))
    assert free.num_blocks(Tier.DEVICE) == none.num_blocks(Tier.DEVICE) == NUM_LAYERS + 3
    assert (cpu.num_blocks(Tier.HOST), cpu.num_blocks(Tier.DISK)) == (NUM_LAYERS, 0)
    assert (nvme.num_blocks(Tier.HOST), nvme.num_blocks(Tier.DISK)) == (0, NUM_LAYERS)
    assert cpu.streamed_bytes == nvme.streamed_bytes > 0


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_offload_asks_for_shows_in_the_bytes(
    folder: Path, batch: dict[str, torch.Tensor], expected: torch.Tensor, device: str
) -> None:
    with loaded(folder, offload(device)) as engine:
        loading = engine.stats()
        for _ in range(4):
            assert torch.equal(engine(**batch).logits, expected)
        stats = engine.stats()
    assert stats.bytes_to_device - loading.bytes_to_device >= 3 * stats.streamed_bytes_per_pass > 0
    read = stats.bytes_read_disk - loading.bytes_read_disk
    assert read == 0 if device == "cpu" else read >= 3 * stats.disk_bytes_per_pass > 0


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_num_slots(folder: Path, layer_bytes: int, num_slots: int) -> None:
    plan = plan_of(folder, offload("cpu"), num_slots=num_slots)
    assert plan.num_slots == num_slots
    assert plan.slot_bytes == layer_bytes


def test_more_slots_than_layers(folder: Path, batch: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    for device in ("cpu", "nvme"):
        with loaded(folder, offload(device), num_slots=50) as engine:
            assert engine.plan.num_slots <= NUM_LAYERS
            assert torch.equal(engine(**batch).logits, expected)


@pytest.mark.parametrize("buffer_count", [1, 2, 4])
def test_buffer_count_is_the_number_of_staging_slots(
    folder: Path, batch: dict[str, torch.Tensor], expected: torch.Tensor, buffer_count: int
) -> None:
    with loaded(folder, offload("nvme", buffer_count=buffer_count)) as engine:
        assert engine.plan.num_staging == buffer_count
        assert torch.equal(engine(**batch).logits, expected)


def test_a_buffer_size_below_a_tensor_is_no_obstacle(
    folder: Path, batch: dict[str, torch.Tensor], expected: torch.Tensor
) -> None:
    with loaded(folder, offload("nvme", buffer_size=100)) as engine:
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.plan.staging_bytes == 8192, "two pages, the least"


def test_a_larger_prefetch_bucket_means_more_slots(folder: Path, layer_bytes: int) -> None:
    """It counts elements fetched ahead: the block in use and so many more are under way."""
    numel = layer_bytes // 4
    found = [
        plan_of(folder, zero(offload_param={"device": "cpu"}, stage3_prefetch_bucket_size=size)).num_slots
        for size in (numel, 2 * numel, 3 * numel, 4 * numel)
    ]
    assert found == sorted(found)
    assert found[0] >= 2
    assert found[-1] > found[0]


def layers_on_device(folder: Path, plan: Plan) -> int:
    """Layers that the device can hold at once: slots, and layers at home there."""
    blocks = blocks_of(folder)
    at_home = [block for block, home in zip(blocks, plan.homes, strict=True) if home.tier is Tier.DEVICE]
    return plan.num_slots + sum("layers" in block.name for block in at_home)


def test_max_live_parameters_caps_the_slots(folder: Path, layer_bytes: int) -> None:
    """Two slots are the least, or nothing could move while a layer computes."""
    numel = layer_bytes // 4
    keys = {"offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": 5 * numel}
    for layers in (5, 4, 3, 2, 1):
        plan = plan_of(folder, zero(**keys, stage3_max_live_parameters=layers * numel))
        assert layers_on_device(folder, plan) == max(layers, 2), f"{layers} layers' worth of live parameters"


def test_max_live_parameters_outranks_the_prefetch_bucket(folder: Path, layer_bytes: int) -> None:
    numel = layer_bytes // 4
    keys = {"offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": 4 * numel}
    assert plan_of(folder, zero(**keys)).num_slots == 5
    assert plan_of(folder, zero(**keys, stage3_max_live_parameters=3 * numel)).num_slots == 3


def test_the_keys_of_everyones_training_config_do_not_switch_offloading_off(folder: Path) -> None:
    """These values stand in nearly every ZeRO-3 file; `cpu` still keeps the layers off the device."""
    keys = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_prefetch_bucket_size": 5e7}
    for device in ("cpu", "nvme"):
        plan = plan_of(folder, zero(offload_param={"device": device, "pin_memory": True}, **keys))
        assert plan.streamed_bytes > 0
        assert plan.num_blocks(Tier.DEVICE) == 3


def test_max_in_cpu_caps_what_the_host_holds(folder: Path, layer_bytes: int) -> None:
    numel = layer_bytes // 4
    for layers in (0, 1, 3, NUM_LAYERS):
        plan = plan_of(folder, offload("cpu", max_in_cpu=layers * numel + 7))
        assert plan.num_blocks(Tier.HOST) == layers
        assert plan.num_blocks(Tier.DISK) == NUM_LAYERS - layers
    assert plan_of(folder, offload("cpu", max_in_cpu=1e9)).num_blocks(Tier.DISK) == 0


def test_max_in_cpu_and_a_module_in_memory_contradict_each_other() -> None:
    """What may not stay in memory has nowhere else to go."""
    with pytest.raises(ZinferError, match="max_in_cpu"):
        plan_of(tiny_model("llama", num_layers=NUM_LAYERS), offload("cpu", max_in_cpu=1000))


def test_a_cast_is_planned_in_the_dtype_that_is_stored_on_the_device(folder: Path, total_bytes: int) -> None:
    half = plan_of(folder, dtype="bf16")
    assert half.device_bytes < 0.6 * total_bytes
    assert plan_of(folder, dtype="bf16", max_weight_memory=half.device_bytes).streamed_bytes == 0


def test_pin_memory_on_a_machine_without_cuda_pins_nothing(folder: Path) -> None:
    with loaded(folder, offload("cpu", pin_memory=True)) as engine:
        assert engine.stats().pinned_bytes == engine.plan.pinned_bytes == 0


def test_a_plan_prints_what_it_holds(folder: Path) -> None:
    text = str(plan_of(folder, offload("nvme"), num_slots=3))
    assert f"{NUM_LAYERS} DISK" in text
    assert "3 slots" in text


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_a_hint_gives_way_to_the_budget(
    folder: Path, batch: dict[str, torch.Tensor], expected: torch.Tensor, layer_bytes: int, num_slots: int
) -> None:
    """The 5e8 of everyone's file asks for more slots than a small device holds: fewer, not a refusal."""
    keys = zero(offload_param={"device": "cpu"}, stage3_prefetch_bucket_size=5e8)
    assert plan_of(folder, keys).num_slots > 4
    budget = (num_slots + 1) * layer_bytes - 1
    with loaded(folder, keys, max_weight_memory=budget) as engine:
        assert engine.plan.num_slots == num_slots
        assert engine.plan.device_bytes <= budget
        assert torch.equal(engine(**batch).logits, expected)
