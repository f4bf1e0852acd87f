"""What holds for every machine: budgets are kept, no term exceeds the pass, and memory does no harm."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_support import SMALL_LLAMA, machine_with, outline_of, write_config

from zinfer.config import Offload, Settings
from zinfer.errors import PlanError
from zinfer.model.outline import Outline
from zinfer.planning.memory import Request
from zinfer.planning.plan import BatchPlan, Case, plan_batch
from zinfer.planning.presets import Machine
from zinfer.planning.step_time import resource_name
from zinfer.probe.rates import Rates

RESERVE_BYTES = 830_000_000  # of a device of little more than that
LEAST_STAGING_BYTES = 20_000

per_second = st.floats(1e8, 1e12)
shares = st.floats(0, 1.3)


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    return outline_of(write_config(tmp_path_factory.mktemp("small-llama"), SMALL_LLAMA))


@st.composite
def speeds(draw: st.DrawFn) -> Rates:
    """The disk at most half as fast as the link, as disks are: else a block is better off on it than in memory."""
    link = draw(per_second)
    return Rates(
        link_bytes_per_s=link,
        disk_bytes_per_s=link * draw(st.floats(0.01, 0.5)),
        host_bytes_per_s=draw(per_second),
        device_bytes_per_s=draw(per_second),
        flops_per_s=draw(st.floats(1e11, 1e15)),
        launch_s=draw(st.floats(0, 1e-3)),
        shares_host=draw(st.booleans()),
        origin="made up",
    )


def machine(outline: Outline, device_share: float, host_share: float, rates: Rates) -> Machine:
    device_bytes = RESERVE_BYTES + int(device_share * outline.nbytes)
    return machine_with(device_bytes, LEAST_STAGING_BYTES + int(host_share * outline.nbytes), rates)


def forecast_or_reject(outline: Outline, machine: Machine, settings: Settings, request: Request) -> BatchPlan:
    try:
        return plan_batch(Case(outline, machine, settings), request)
    except PlanError:
        assume(False)
        raise AssertionError("assume raises") from None


offloads = st.builds(Offload, device=st.sampled_from([None, "none", "cpu", "nvme"]), pin_memory=st.booleans())
requests = st.builds(Request, st.integers(1, 40), st.integers(1, 60), st.integers(1, 30))


@given(shares, shares, speeds(), offloads, requests)
def test_budgets_are_kept_and_the_pass_is_its_slowest_term(
    outline: Outline, device_share: float, host_share: float, rates: Rates, offload: Offload, request: Request
) -> None:
    lent = machine(outline, device_share, host_share, rates)
    forecast = forecast_or_reject(outline, lent, Settings(offload=offload), request)
    plan, prediction = forecast.plan, forecast.prediction
    reserve = 800_000_000 + int(0.03 * lent.device_memory_bytes)
    assert plan.device_bytes + forecast.footprint.nbytes + reserve <= lent.device_memory_bytes
    assert plan.host_bytes <= lent.limits.host_bytes
    assert plan.pinned_bytes <= lent.limits.pinned_bytes
    assert sum(forecast.tier_bytes.values()) == outline.nbytes
    for time in (prediction.prefill, prediction.decode):
        slowest = [name for name, seconds in time.terms.items() if seconds == max(time.terms.values()) == time.seconds]
        assert time.bottleneck in [resource_name(name, on_host=time.shares_host) for name in slowest]
        assert all(0 <= seconds < math.inf for seconds in time.terms.values())
    assert prediction.prefill.matrix_s >= prediction.decode.matrix_s
    assert prediction.tokens_per_s * prediction.seconds == pytest.approx(request.batch_size * request.new_tokens)


@given(shares, shares, shares, shares, speeds(), st.sampled_from([None, "cpu", "nvme"]), st.integers(1, 3))
def test_more_memory_never_predicts_slower(
    outline: Outline,
    device_share: float,
    host_share: float,
    more_device: float,
    more_host: float,
    rates: Rates,
    offload: str | None,
    num_slots: int,
) -> None:
    """With the slots stated: a third one, which the planner takes for mixed homes, may cost a resident block."""
    settings = Settings(num_slots=num_slots, offload=Offload(device=offload))  # type: ignore[arg-type]
    request = Request(2, 16, 4)
    less = forecast_or_reject(outline, machine(outline, device_share, host_share, rates), settings, request)
    more = plan_batch(
        Case(outline, machine(outline, device_share + more_device, host_share + more_host, rates), settings), request
    )
    assert more.prediction.tokens_per_s >= less.prediction.tokens_per_s * (1 - 1e-9)
    assert more.prediction.decode.link_s <= less.prediction.decode.link_s * (1 + 1e-9)


@given(speeds(), shares, shares, st.sampled_from(["link", "disk", "host", "device"]))
def test_a_faster_machine_never_predicts_slower(
    outline: Outline, rates: Rates, device_share: float, host_share: float, faster: str
) -> None:
    lent, request = machine(outline, device_share, host_share, rates), Request(2, 16, 4)
    before = forecast_or_reject(outline, lent, Settings(), request).prediction
    name = f"{faster}_bytes_per_s"
    doubled = replace(rates, **{name: 2 * getattr(rates, name)})
    after = plan_batch(Case(outline, replace(lent, rates=doubled), Settings()), request).prediction
    assert before.tokens_per_s <= after.tokens_per_s <= 2.000001 * before.tokens_per_s


def test_a_cpu_plan_has_no_copies_into_staging(outline: Outline) -> None:
    lent = machine_with(2_000_000_000, 2_000_000_000)
    lent = replace(lent, limits=replace(lent.limits, device=torch.device("cpu")))
    forecast = plan_batch(Case(outline, lent, Settings(offload=Offload(device="cpu"))), Request(2, 16, 4))
    assert forecast.plan.pinned_bytes == 0
    assert forecast.prediction.decode.host_s == 0
    assert forecast.prediction.decode.link_s == pytest.approx(forecast.plan.streamed_bytes / 10e9, rel=1e-9)
