"""Memory budgets are kept and used; one that is too small says how much is needed."""

import re
from pathlib import Path

import pytest
import torch
from budget_support import (
    NUM_LAYERS,
    batch,
    expected,
    folder,
    layer_bytes,
    offload,
    plan_of,
    small_bytes,
    total_bytes,
)
from checkpoints import tiny_model
from engines import blocks_of, loaded
from hypothesis import given
from hypothesis import strategies as st

import zinfer
from zinfer.errors import ConfigError, PlanError
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import Tier
from zinfer.offload.chunks import covered_bytes
from zinfer.planning.placement import Plan

__all__ = ["batch", "expected", "folder", "layer_bytes", "small_bytes", "total_bytes"]  # fixtures


TIERS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}


def needed_bytes(message: str) -> int:
    """The exact figure of "at least 295936 bytes (295.94 kB) are needed"."""
    found = re.search(r"[Aa]t least (\d+) bytes", message)
    assert found, message
    return int(found[1])


@pytest.mark.sampled(5)
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
    with pytest.raises(PlanError, match=r"max_weight_memory.*model\.layers\.\d") as caught:
        plan_of(folder, config, max_weight_memory=1, **slots)
    needed = needed_bytes(str(caught.value))
    assert needed == (num_slots or 2) * layer_bytes
    with pytest.raises(PlanError, match=f"{needed - 1} B|max_weight_memory"):
        plan_of(folder, config, max_weight_memory=needed - 1, **slots)
    with loaded(folder, config, max_weight_memory=needed, **slots) as engine:
        assert engine.plan.device_bytes <= needed
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().device_bytes <= needed


@pytest.mark.sampled(4)
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
        plan_of(folder, config, max_weight_memory=budget, max_host_memory=1, **slots)
    needed = needed_bytes(str(caught.value))
    with pytest.raises(PlanError, match="max_host_memory"):
        plan_of(folder, config, max_weight_memory=budget, max_host_memory=needed - 1, **slots)
    with loaded(folder, config, max_weight_memory=budget, max_host_memory=needed, **slots) as engine:
        assert engine.plan.host_bytes <= needed
        assert torch.equal(engine(**batch).logits, expected)


def test_a_head_that_is_larger_than_any_layer(tmp_path: Path) -> None:
    model = tiny_model("gpt2", num_layers=2)
    model.resize_token_embeddings(5000)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[4999, 3, 700]])
    with torch.no_grad():
        expected = model(ids).logits
    with pytest.raises(PlanError, match=r"max_weight_memory.*wte") as caught:
        plan_of(tmp_path, max_weight_memory=1)
    needed = needed_bytes(str(caught.value))
    with pytest.raises(PlanError, match="max_weight_memory"):
        plan_of(tmp_path, max_weight_memory=needed - 1)
    with loaded(tmp_path, max_weight_memory=needed) as engine:
        assert engine.plan.device_bytes <= needed
        assert torch.equal(engine(ids).logits, expected)


def test_a_module_in_memory_that_the_host_cannot_hold(layer_bytes: int, batch: dict[str, torch.Tensor]) -> None:
    """It has no home on disk, so the host must take what the device does not."""
    budgets = {"max_weight_memory": 2 * layer_bytes}
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
    assert plan_of(folder, max_weight_memory="1GB").streamed_bytes == 0
    with pytest.raises(PlanError, match=r"max_weight_memory is 100\.00 kB"):
        plan_of(folder, max_weight_memory="100KB")
    assert plan_of(folder, {"zinfer": {"max_weight_memory": "400KB"}}).device_bytes <= 400_000


def test_config_and_kwargs_that_contradict_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"zinfer\.max_weight_memory is given twice with different values"):
        plan_of(folder, {"zinfer": {"max_weight_memory": "1GB"}}, max_weight_memory="2GB")
    assert plan_of(folder, {"zinfer": {"max_weight_memory": "1GB"}}, max_weight_memory=10**9).streamed_bytes == 0
    with pytest.raises(ConfigError, match=r"offload_param\.device is given twice"):
        plan_of(folder, offload("cpu"), zero={"offload_param": {"device": "nvme"}})


def test_more_pinned_than_host_memory_is_no_licence(folder: Path, layer_bytes: int) -> None:
    plan = plan_of(
        folder, offload("cpu"), max_weight_memory=2 * layer_bytes, max_host_memory="1MB", max_pinned_memory="1GB"
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
            folder, device="cpu", max_weight_memory=device_budget, max_host_memory=host_budget, **slots
        )
    except PlanError as error:
        engine = str(error)
    if isinstance(engine, str):
        short = device_budget if "max_weight_memory is" in engine else host_budget
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
        loading = 2 * max(covered_bytes(block.extents) for block in blocks)
        if host_budget >= in_pages + loading:
            assert engine.stats().blocks_by_home["DISK"] == 0, "the host had room for all of it"
    finally:
        engine.destroy()


def counts(folder: Path, device_budget: int, host_budget: int) -> tuple[int, int, int]:
    plan = plan_of(folder, max_weight_memory=device_budget, max_host_memory=host_budget)
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
    plan = plan_of(folder, max_weight_memory=2 * layer_bytes + small_bytes)
    blocks = blocks_of(folder)
    resident = {block.name for block, home in zip(blocks, plan.homes, strict=True) if home.tier is Tier.DEVICE}
    assert len(resident) == 3
    assert not any("layers" in name for name in resident)
