"""Seconds waited count while the device has nothing to do, not while a thread waits and the device computes."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from zinfer.offload.block import Tier
from zinfer.offload.stats import Stalls


def stalls_after(begin_s: float, loaded_at_s: float, computed: Any, tier: Tier = Tier.DISK) -> dict[str, float]:
    """After one wait that ends now, for a transfer whose last part was loaded then."""
    stalls = Stalls([])
    transfer: Any = SimpleNamespace(source=SimpleNamespace(tier=tier, staged=True), loaded_at_s=loaded_at_s)
    stalls.note_wait(transfer, begin_s, computed)
    return stalls.seconds()


def reached(at_s: float) -> Any:
    return SimpleNamespace(is_reached=lambda: True, time_s=lambda: at_s)


@pytest.mark.parametrize(
    ("computed_ago_s", "disk_s", "link_s"),
    [
        pytest.param(12, 8, 2, id="done before the wait"),
        pytest.param(4, 2, 2, id="done within it"),
        pytest.param(1, 0, 1, id="done after the reads"),
    ],
)
def test_a_wait_counts_from_when_the_device_has_done_its_work(
    computed_ago_s: float, disk_s: float, link_s: float
) -> None:
    """Of ten seconds of waiting, whose reads ended two seconds ago."""
    now_s = time.perf_counter()
    found = stalls_after(now_s - 10, now_s - 2, reached(now_s - computed_ago_s))
    assert found == pytest.approx({"disk": disk_s, "host": 0, "link": link_s, "compute": 0}, abs=0.5)
    host = stalls_after(now_s - 10, now_s - 2, reached(now_s - computed_ago_s), Tier.HOST)
    assert host["host"] == pytest.approx(disk_s, abs=0.5)


def test_nothing_counts_while_the_device_computes() -> None:
    now_s = time.perf_counter()
    for computed in (None, SimpleNamespace(is_reached=lambda: False)):
        assert not any(stalls_after(now_s - 10, now_s, computed).values())
