"""Advice names changes that pay, and what it promises is what planning with the change predicts."""

import re
from dataclasses import replace
from typing import Literal

import pytest
from plan_support import SMALL_LLAMA, machine_with, outline_of, rates, write_config

from zinfer.config import Offload, Settings
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.model.outline import Outline, read_outline
from zinfer.offload.block import Tier
from zinfer.planning.advice import Advice, advise
from zinfer.planning.memory import Request
from zinfer.planning.plan import Case, plan_batch
from zinfer.planning.presets import Machine

ROOMY = 1_200_000_000  # for the model and the CUDA context
TIGHT = 850_000_000  # for a few layers
REQUEST = Request(2, 16, 64)


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    return outline_of(write_config(tmp_path_factory.mktemp("small-llama"), SMALL_LLAMA))


def advice_for(outline: Outline, machine: Machine, settings: Settings, request: Request = REQUEST) -> list[Advice]:
    forecast = plan_batch(Case(outline, machine, settings), request)
    return list(advise(forecast))


def tokens_per_s(outline: Outline, machine: Machine, settings: Settings, request: Request = REQUEST) -> float:
    return plan_batch(Case(outline, machine, settings), request).prediction.tokens_per_s


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_idle_device_memory_is_pointed_out(outline: Outline, device: str) -> None:
    machine = machine_with(ROOMY, ROOMY)
    settings = Settings(offload=Offload(device=device))  # type: ignore[arg-type]
    found = advice_for(outline, machine, settings)
    removal = next(each for each in found if "offload_param.device" in each.change)
    assert removal.change.startswith(f'remove zero_optimization.offload_param.device "{device}", which leaves ')
    assert removal.tokens_per_s == pytest.approx(tokens_per_s(outline, machine, Settings()))
    assert removal.gain > 10


def test_enough_host_memory_is_named_and_enough(outline: Outline) -> None:
    machine = machine_with(TIGHT, 20_000_000)
    host = next(each for each in advice_for(outline, machine, Settings()) if "host memory" in each.change)
    assert re.fullmatch(r"[\d.]+ MB of host memory for weights instead of 20\.00 MB, so .* on disk", host.change)
    needed = round(float(host.change.split()[0]) * 1e6) + 10_000  # printed to 10 kB
    larger = plan_batch(Case(outline, machine_with(TIGHT, needed), Settings()), REQUEST)
    assert larger.plan.num_blocks(Tier.DISK) == 0
    assert larger.prediction.tokens_per_s == pytest.approx(host.tokens_per_s)
    assert larger.plan.host_bytes == pytest.approx(needed, abs=20_000)
    weights = larger.tier_bytes[Tier.HOST]  # without a place for staging they do not all fit
    smaller = plan_batch(Case(outline, machine_with(TIGHT, weights), Settings()), REQUEST)
    assert smaller.plan.num_blocks(Tier.DISK) > 0


def test_a_limit_on_elements_in_host_memory_is_pointed_out(outline: Outline) -> None:
    settings = Settings(offload=Offload(max_in_cpu=1_000_000))
    changes = [each.change for each in advice_for(outline, machine_with(TIGHT, ROOMY), settings)]
    assert any("remove offload_param.max_in_cpu" in change for change in changes)


def test_a_larger_batch_is_named_while_tokens_are_free(outline: Outline) -> None:
    machine, settings = machine_with(TIGHT, ROOMY), Settings()
    batch = next(each for each in advice_for(outline, machine, settings) if "a batch of" in each.change)
    batch_size = int(batch.change.split()[3].replace(",", ""))
    assert batch_size > 2
    free_tokens = plan_batch(Case(outline, machine, settings), REQUEST).prediction.free_tokens
    assert batch_size <= free_tokens
    assert batch.tokens_per_s == pytest.approx(
        tokens_per_s(outline, machine, settings, replace(REQUEST, batch_size=batch_size))
    )
    assert str(batch).startswith(f"a batch of {batch_size:,} prompts: ")
    assert str(batch).endswith(" times as many")


def test_several_disks_are_named_where_the_disk_bounds(outline: Outline) -> None:
    slow, settings = machine_with(TIGHT, 20_000_000), Settings()
    slow = replace(slow, rates=replace(slow.rates, disk_bytes_per_s=slow.rates.disk_bytes_per_s / 10))
    planned = plan_batch(Case(outline, slow, settings), REQUEST)
    assert planned.prediction.decode.bottleneck == "disk"
    found = {each.change: each for each in advise(planned)}
    for count in (2, 4):
        faster = replace(slow, rates=replace(slow.rates, disk_bytes_per_s=count * slow.rates.disk_bytes_per_s))
        named = found[f"{count} such disks as one (RAID 0)"]
        assert named.tokens_per_s == pytest.approx(tokens_per_s(outline, faster, settings))
        assert 1.2 < named.gain <= count
    fast = replace(slow, rates=replace(slow.rates, disk_bytes_per_s=1e15))
    assert not any("RAID" in each.change for each in advice_for(outline, fast, settings))


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 128)])
def test_quantized_weights_are_named_and_what_they_bring(
    outline: Outline, bits: Literal[4, 8], group_size: int
) -> None:
    machine = machine_with(TIGHT, 20_000_000)
    change = f'zinfer.quantization {{"bits": {bits}' + (f', "group_size": {group_size}' if group_size else "") + "}"
    quantized = next(each for each in advice_for(outline, machine, Settings()) if each.change == change)
    rules = Quantization((QuantRule(bits=bits, group_size=group_size),))
    smaller = read_outline(outline.name, outline.dtype, rules)
    assert smaller.nbytes < outline.nbytes
    settings = Settings(quantization=rules)
    assert quantized.tokens_per_s == pytest.approx(tokens_per_s(smaller, machine, settings))
    assert quantized.gain > 2
    assert not any("quantization" in each.change for each in advice_for(smaller, machine, settings))


def test_nothing_is_advised_where_nothing_pays(outline: Outline) -> None:
    machine = machine_with(ROOMY, ROOMY, rates(flops_per_s=1e9))
    forecast = plan_batch(Case(outline, machine, Settings()), REQUEST)
    assert forecast.plan.streamed_bytes == 0
    assert advise(forecast) == ()


def test_the_best_comes_first(outline: Outline) -> None:
    gains = [each.gain for each in advice_for(outline, machine_with(TIGHT, 20_000_000), Settings())]
    assert len(gains) == 6
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.05
