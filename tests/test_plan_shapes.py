"""Five large families on both presets: budgets are kept, tiers add up, and seconds are the arithmetic's."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_support import CONFIGS, NUM_PARAMS, outline_of, write_config

from zinfer.config import Offload, Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.model.outline import Outline
from zinfer.offload.block import Tier
from zinfer.planning.memory import Request
from zinfer.planning.plan import BatchPlan, Case, plan_batch
from zinfer.planning.presets import PRESETS, find_preset

REQUEST = Request(batch_size=4, prompt_len=512, new_tokens=32)
# Homes come from the memory: 48 + 204.8 GB and 141 + 409.6 GB, less the request's part.
ON_DISK = {(name, "a6000") for name in CONFIGS if name != "Llama-3-70B"} | {("Llama-3.1-405B", "h200")}
ACTIVE_MIXTRAL = 39_149_961_216 - 6144 * 32768  # published active parameters, less the embedding, which is looked up


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outline(name: str, tmp_path_factory: pytest.TempPathFactory) -> Outline:
    return outline_of(write_config(tmp_path_factory.mktemp(name), CONFIGS[name]))


@pytest.fixture(scope="module", params=("a6000", "h200"))
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def forecast(outline: Outline, preset: str) -> BatchPlan:
    return plan_batch(Case(outline, PRESETS[preset], Settings()), REQUEST)


@pytest.mark.sampled(3)
def test_tiers_add_up_to_the_model(forecast: BatchPlan, name: str) -> None:
    assert sum(forecast.tier_bytes.values()) == pytest.approx(2 * NUM_PARAMS[name], rel=1e-6)
    assert forecast.plan.streamed_bytes == forecast.tier_bytes[Tier.HOST] + forecast.tier_bytes[Tier.DISK]


def test_budgets_are_kept_and_used(forecast: BatchPlan, preset: str, name: str) -> None:
    plan, device_memory = forecast.plan, PRESETS[preset].device_memory_bytes
    taken = plan.device_bytes + forecast.footprint.nbytes
    assert taken <= 0.97 * device_memory - 800_000_000
    assert taken > 0.97 * device_memory - 800_000_000 - 2 * plan.slot_bytes
    assert plan.pinned_bytes <= plan.host_bytes <= PRESETS[preset].limits.host_bytes
    if (name, preset) in ON_DISK:
        assert plan.host_bytes > PRESETS[preset].limits.host_bytes - 2 * plan.slot_bytes


def test_the_bottleneck_is_where_the_homes_are(forecast: BatchPlan, name: str, preset: str) -> None:
    on_disk = (name, preset) in ON_DISK
    assert (forecast.plan.num_blocks(Tier.DISK) > 0) == on_disk
    # Of Mixtral so few layers are left on disk that the link takes longer with all of those that are streamed.
    disk_bound = on_disk and name != "Mixtral-8x22B"
    assert forecast.prediction.decode.bottleneck == ("disk" if disk_bound else "link")


def test_seconds_are_the_arithmetic(forecast: BatchPlan, preset: str, name: str) -> None:
    rates, prediction = PRESETS[preset].rates, forecast.prediction
    disk_s = forecast.tier_bytes[Tier.DISK] / rates.disk_bytes_per_s
    link_s = forecast.plan.streamed_bytes / rates.link_bytes_per_s
    assert prediction.decode.disk_s == pytest.approx(disk_s, rel=1e-6)
    assert prediction.decode.link_s == pytest.approx(link_s, rel=1e-9)
    assert prediction.decode.seconds == pytest.approx(max(disk_s, link_s), rel=1e-6)
    config = CONFIGS[name]
    looked_up = config["hidden_size"] * config["vocab_size"]
    active = ACTIVE_MIXTRAL if name == "Mixtral-8x22B" else NUM_PARAMS[name]
    if name.startswith("Llama"):
        active -= looked_up
    assert prediction.decode.matrix_s == pytest.approx(2 * active * 4 / rates.flops_per_s, rel=1e-3)
    head = 2 * looked_up * (4 * 512 - 4)
    prefill_s = (2 * active * 4 * 512 - head) / rates.flops_per_s
    assert prediction.prefill.matrix_s == pytest.approx(prefill_s, rel=1e-3)
    seconds = prediction.prefill.seconds + 31 * prediction.decode.seconds
    assert prediction.tokens_per_s == pytest.approx(4 * 32 / seconds, rel=1e-9)


def test_a_batch_whose_cache_does_not_fit_says_what_to_lower(outline: Outline, preset: str, name: str) -> None:
    with pytest.raises(PlanError, match=r"the request does not fit: the KV cache takes .* lower the batch size first"):
        plan_batch(Case(outline, PRESETS[preset], Settings()), Request(4096, 512, 128))


def test_a_cache_that_leaves_too_little_for_slots_says_so(outline: Outline, preset: str, name: str) -> None:
    machine = replace(PRESETS[preset], device_memory_bytes=16_000_000_000)
    with pytest.raises(PlanError, match=r"the request does not fit: .* of 16\.00 GB device memory"):
        plan_batch(Case(outline, machine, Settings()), Request(24 if name.startswith("Llama") else 8, 1024, 64))


def test_a_stated_device_budget_must_leave_room_for_the_request(outline: Outline, preset: str) -> None:
    memory = replace(Settings().memory, max_weight_memory=PRESETS[preset].device_memory_bytes)
    settings = Settings(memory=memory)
    with pytest.raises(PlanError, match=r"zinfer\.max_weight_memory is .* only \d+ bytes"):
        plan_batch(Case(outline, find_preset(preset, settings), settings), REQUEST)


def test_stated_budgets_are_kept(outline: Outline, preset: str) -> None:
    # The batch takes 11 GB of it, and a block of BLOOM's in two slots 14 GB.
    memory = replace(Settings().memory, max_device_memory=30_000_000_000, max_host_memory=30_000_000_000)
    settings = Settings(memory=memory)
    forecast = plan_batch(Case(outline, find_preset(preset, settings), settings), REQUEST)
    assert forecast.plan.device_bytes < forecast.parts.total <= 30_000_000_000
    assert forecast.plan.pinned_bytes <= forecast.plan.host_bytes <= 30_000_000_000
    assert forecast.prediction.decode.bottleneck == "disk"


def test_offload_to_disk_is_heeded(outline: Outline, preset: str) -> None:
    forecast = plan_batch(Case(outline, PRESETS[preset], Settings(offload=Offload(device="nvme"))), REQUEST)
    assert forecast.plan.num_blocks(Tier.DISK) == len(outline.layers)
    assert forecast.tier_bytes[Tier.HOST] == 0


def test_too_long_sequences_are_refused(tmp_path: Path) -> None:
    outline = outline_of(write_config(tmp_path, CONFIGS["OPT-175B"]))
    with pytest.raises(ConfigError, match=r"more than 2048 \(the model's positions\)"):
        plan_batch(Case(outline, PRESETS["h200"], Settings()), Request(1, 2000, 49))
    plan_batch(Case(outline, PRESETS["h200"], Settings()), Request(1, 2000, 48))
    with pytest.raises(ConfigError, match=r"more than 100 \(max_out_tokens\)"):
        plan_batch(Case(outline, PRESETS["h200"], Settings(max_out_tokens=100)), Request(1, 90, 11))


def test_presets_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ConfigError, match=r"--machine h20: no such preset; did you mean .*h200"):
        find_preset("h20", Settings())
    with pytest.raises(ConfigError, match=r'zinfer\.device is "cpu"'):
        find_preset("h200", Settings(device="cpu"))
