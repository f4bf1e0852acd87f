"""Memory budgets and placement keys decide where blocks live; a budget that is too small says how much is needed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint, tiny_model
from engines import blocks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import zinfer
from zinfer.errors import ConfigError, PlanError, ZinferError
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import Tier
from zinfer.offload.read_plan import plan_reads
from zinfer.planner import Plan

NUM_LAYERS = 6
TIERS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, shards=2)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(2, seed=2))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.fixture(scope="module")
def expected(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


@pytest.fixture(scope="module")
def total_bytes(folder: Path) -> int:
    return sum(block.nbytes for block in blocks_of(folder))


@pytest.fixture(scope="module")
def layer_bytes(folder: Path) -> int:
    return max(block.nbytes for block in blocks_of(folder))


@pytest.fixture(scope="module")
def small_bytes(total_bytes: int, layer_bytes: int) -> int:
    """Embedding, norm and head together."""
    return total_bytes - NUM_LAYERS * layer_bytes


@contextmanager
def loaded(model: Any, config: Any = None, **kwargs: Any) -> Iterator[zinfer.InferenceEngine]:
    engine = zinfer.init_inference(model, config, device="cpu", **kwargs)
    try:
        yield engine
    finally:
        engine.destroy()


def plan_of(model: Any, config: Any = None, **kwargs: Any) -> Plan:
    with loaded(model, config, **kwargs) as engine:
        return engine.plan


def offload(device: str, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": device, **keys}}}


def zero(**keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, **keys}}


def needed_bytes(message: str) -> int:
    """The exact figure of "at least 295936 bytes (295.94 kB) are needed"."""
    found = re.search(r"[Aa]t least (\d+) bytes", message)
    assert found, message
    return int(found[1])


@pytest.mark.parametrize("num_slots", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("device", [None, "cpu", "nvme"])
def test_the_least_device_memory_is_named_and_enough(
    folder: Path,
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor,
    layer_bytes: int,
    num_slots: int | None,
    device: str | None,
) -> None:
    config = offload(device) if device else {}
    slots = {} if num_slots is None else {"num_slots": num_slots}
    with pytest.raises(PlanError, match=r"max_device_memory.*model\.layers\.\d") as caught:
        plan_of(folder, config, max_device_memory=1, **slots)
    needed = needed_bytes(str(caught.value))
    assert needed == (num_slots or 2) * layer_bytes
    with pytest.raises(PlanError, match=f"{needed - 1} B|max_device_memory"):
        plan_of(folder, config, max_device_memory=needed - 1, **slots)
    with loaded(folder, config, max_device_memory=needed, **slots) as engine:
        assert engine.plan.device_bytes <= needed
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().device_bytes <= needed


@pytest.mark.parametrize("num_slots", [None, 1, 3])
@pytest.mark.parametrize("device", [None, "cpu", "nvme"])
def test_the_least_host_memory_is_named_and_enough(
    folder: Path,
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor,
    layer_bytes: int,
    num_slots: int | None,
    device: str | None,
) -> None:
    config = offload(device) if device else {}
    slots = {} if num_slots is None else {"num_slots": num_slots}
    budget = (num_slots or 2) * layer_bytes
    with pytest.raises(PlanError, match="max_host_memory is 1 B") as caught:
        plan_of(folder, config, max_device_memory=budget, max_host_memory=1, **slots)
    needed = needed_bytes(str(caught.value))
    with pytest.raises(PlanError, match="max_host_memory"):
        plan_of(folder, config, max_device_memory=budget, max_host_memory=needed - 1, **slots)
    with loaded(folder, config, max_device_memory=budget, max_host_memory=needed, **slots) as engine:
        assert engine.plan.host_bytes <= needed
        assert torch.equal(engine(**batch).logits, expected)


def test_a_head_that_is_larger_than_any_layer(tmp_path: Path) -> None:
    model = tiny_model("gpt2", num_layers=2)
    model.resize_token_embeddings(5000)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[4999, 3, 700]])
    with torch.no_grad():
        expected = model(ids).logits
    with pytest.raises(PlanError, match=r"max_device_memory.*wte") as caught:
        plan_of(tmp_path, max_device_memory=1)
    needed = needed_bytes(str(caught.value))
    with pytest.raises(PlanError, match="max_device_memory"):
        plan_of(tmp_path, max_device_memory=needed - 1)
    with loaded(tmp_path, max_device_memory=needed) as engine:
        assert engine.plan.device_bytes <= needed
        assert torch.equal(engine(ids).logits, expected)


def test_a_module_in_memory_that_the_host_cannot_hold(layer_bytes: int, batch: dict[str, torch.Tensor]) -> None:
    """It has no home on disk, so the host must take what the device does not."""
    budgets = {"max_device_memory": 2 * layer_bytes}
    with pytest.raises(PlanError, match="max_host_memory is 1 B") as caught:
        plan_of(tiny_model("llama", num_layers=NUM_LAYERS), max_host_memory=1, **budgets)
    needed = needed_bytes(str(caught.value))
    with pytest.raises(PlanError, match="max_host_memory"):
        plan_of(tiny_model("llama", num_layers=NUM_LAYERS), max_host_memory=needed - 1, **budgets)
    model = tiny_model("llama", num_layers=NUM_LAYERS)
    with torch.no_grad():
        expected = model(**batch).logits
    with loaded(model, max_host_memory=needed, **budgets) as engine:
        assert torch.equal(engine(**batch).logits, expected)


def test_a_budget_with_a_unit(folder: Path, layer_bytes: int) -> None:
    assert plan_of(folder, max_device_memory="1GB").streamed_bytes == 0
    with pytest.raises(PlanError, match=r"max_device_memory is 100\.00 kB"):
        plan_of(folder, max_device_memory="100KB")
    assert plan_of(folder, {"zinfer": {"max_device_memory": "400KB"}}).device_bytes <= 400_000


def test_config_and_kwargs_that_contradict_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"zinfer\.max_device_memory is given twice with different values"):
        plan_of(folder, {"zinfer": {"max_device_memory": "1GB"}}, max_device_memory="2GB")
    assert plan_of(folder, {"zinfer": {"max_device_memory": "1GB"}}, max_device_memory=10**9).streamed_bytes == 0
    with pytest.raises(ConfigError, match=r"offload_param\.device is given twice"):
        plan_of(folder, offload("cpu"), zero={"offload_param": {"device": "nvme"}})


def test_more_pinned_than_host_memory_is_no_licence(folder: Path, layer_bytes: int) -> None:
    plan = plan_of(
        folder, offload("cpu"), max_device_memory=2 * layer_bytes, max_host_memory="1MB", max_pinned_memory="1GB"
    )
    assert plan.pinned_bytes <= plan.host_bytes <= 10**6


def check_plan(plan: Plan, engine: zinfer.InferenceEngine, device_budget: int, host_budget: int) -> None:
    stats = engine.stats()
    assert plan.device_bytes <= device_budget
    assert plan.host_bytes <= host_budget
    assert plan.pinned_bytes <= plan.host_bytes
    assert stats.device_bytes <= plan.device_bytes
    assert stats.host_bytes <= plan.host_bytes
    assert stats.blocks_by_home == {tier.name: plan.num_blocks(tier) for tier in TIERS}
    assert (stats.streamed_bytes_per_pass == 0) == (plan.num_blocks(Tier.DEVICE) == len(plan.homes))


@given(device_share=st.floats(0.0, 1.3), host_share=st.floats(0.0, 1.3), num_slots=st.sampled_from([None, 1, 2, 3]))
@settings(max_examples=40)
def test_any_budgets_are_kept(
    folder: Path,
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor,
    total_bytes: int,
    device_share: float,
    host_share: float,
    num_slots: int | None,
) -> None:
    device_budget, host_budget = 1 + int(device_share * total_bytes), 1 + int(host_share * total_bytes)
    slots = {} if num_slots is None else {"num_slots": num_slots}
    engine: zinfer.InferenceEngine | str
    try:
        engine = zinfer.init_inference(
            folder, device="cpu", max_device_memory=device_budget, max_host_memory=host_budget, **slots
        )
    except PlanError as error:
        engine = str(error)
    if isinstance(engine, str):
        short = device_budget if "max_device_memory is" in engine else host_budget
        assert needed_bytes(engine) > short, "a budget was refused although it holds what is needed"
        return
    try:
        check_plan(engine.plan, engine, device_budget, host_budget)
        assert torch.equal(engine(**batch).logits, expected)
        check_plan(engine.plan, engine, device_budget, host_budget)
        if device_budget >= total_bytes:
            assert engine.stats().streamed_bytes_per_pass == 0
            assert engine.stats().blocks_by_home["DEVICE"] == NUM_LAYERS + 3
        blocks = blocks_of(folder)
        in_pages = sum(align_up(block.nbytes) for block in blocks)
        loading = 2 * max(plan_reads(block.extents).staging_bytes for block in blocks)
        if host_budget >= in_pages + loading:
            assert engine.stats().blocks_by_home["DISK"] == 0, "the host had room for all of it"
    finally:
        engine.destroy()


def counts(folder: Path, device_budget: int, host_budget: int) -> tuple[int, int, int]:
    plan = plan_of(folder, max_device_memory=device_budget, max_host_memory=host_budget)
    return plan.num_blocks(Tier.DEVICE), plan.num_blocks(Tier.HOST), plan.num_blocks(Tier.DISK)


def test_homes_move_down_as_the_device_shrinks(folder: Path, total_bytes: int, layer_bytes: int) -> None:
    budgets = [total_bytes + 1, total_bytes, *range(total_bytes - 1, 2 * layer_bytes, -layer_bytes // 2)]
    found = [counts(folder, budget, 2 * total_bytes) for budget in budgets]
    assert found[0] == found[1] == (NUM_LAYERS + 3, 0, 0)
    assert found[2][0] < NUM_LAYERS + 3
    assert [resident for resident, _, _ in found] == sorted((resident for resident, _, _ in found), reverse=True)
    assert all(disk == 0 for _, _, disk in found)
    assert len({resident for resident, _, _ in found}) >= NUM_LAYERS - 2, "the device fills layer by layer"


def test_homes_move_down_as_the_host_shrinks(folder: Path, total_bytes: int, layer_bytes: int) -> None:
    device = 2 * layer_bytes
    least = 3 * layer_bytes
    found = [counts(folder, device, budget) for budget in range(2 * total_bytes, least, -layer_bytes)]
    on_disk = [disk for _, _, disk in found]
    assert on_disk == sorted(on_disk)
    assert on_disk[0] == 0
    assert on_disk[-1] >= NUM_LAYERS - 1
    assert len(set(on_disk)) >= 4, "the host fills layer by layer"


def test_spare_device_memory_holds_layers(folder: Path, total_bytes: int, layer_bytes: int, small_bytes: int) -> None:
    """One byte less than everything costs as few layers as the slots allow, not all of them."""
    resident, host, _ = counts(folder, total_bytes - 1, 2 * total_bytes)
    slots = 2
    assert resident >= 3 + NUM_LAYERS - slots - 1
    assert host >= 1
    resident, _, _ = counts(folder, slots * layer_bytes + small_bytes + 2 * layer_bytes, 2 * total_bytes)
    assert resident == 3 + 2


def test_the_small_blocks_are_resident_first(folder: Path, layer_bytes: int, small_bytes: int) -> None:
    plan = plan_of(folder, max_device_memory=2 * layer_bytes + small_bytes)
    blocks = blocks_of(folder)
    resident = {block.name for block, home in zip(blocks, plan.homes, strict=True) if home.tier is Tier.DEVICE}
    assert len(resident) == 3
    assert not any("layers" in name for name in resident)


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
        assert [key.path for key in engine.settings.without_effect] == ["zero_optimization.offload_param.buffer_size"]


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
    assert plan_of(folder, dtype="bf16", max_device_memory=half.device_bytes).streamed_bytes == 0


def test_pin_memory_on_a_machine_without_cuda_pins_nothing(folder: Path) -> None:
    with loaded(folder, offload("cpu", pin_memory=True)) as engine:
        assert engine.stats().pinned_bytes == engine.plan.pinned_bytes == 0


def test_a_plan_prints_what_it_holds(folder: Path) -> None:
    text = str(plan_of(folder, offload("nvme"), num_slots=3))
    assert f"{NUM_LAYERS} DISK" in text
    assert "3 slots" in text
