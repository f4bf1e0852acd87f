"""What the machine lends: a container's memory limit counts as well as the machine's own."""

import sys
from pathlib import Path

import psutil
import pytest
import torch

from zinfer.config import Memory, Settings
from zinfer.probe import limits as machine
from zinfer.probe.limits import MachineLimits, _free_in_cgroup, find_limits, usual_host_bytes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /sys/fs/cgroup."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


def free_in_cgroup(folder: Path, limit: str, used: str, *cached: int) -> int:
    """``cached``: bytes of files, of which those of a temporary file system stay."""
    inactive, active, shmem = cached or (0, 0, 0)
    several = {"file": inactive + active + shmem, "shmem": shmem, "inactive_file": inactive, "active_file": active}
    (folder / "memory.stat").write_text("".join(f"{name} {nbytes}\n" for name, nbytes in several.items()))
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(used)
    return _free_in_cgroup()


def test_a_limit_leaves_what_is_not_used(folder: Path) -> None:
    assert free_in_cgroup(folder, "1000000\n", "300000\n") == 700_000


def test_the_page_cache_is_free(folder: Path) -> None:
    assert free_in_cgroup(folder, "1000000\n", "300000\n", 150_000, 50_000, 40_000) == 900_000


def test_a_limit_that_is_used_up_leaves_nothing(folder: Path) -> None:
    assert free_in_cgroup(folder, "1000\n", "1200\n") == 0


def test_without_a_limit_the_machine_decides(folder: Path) -> None:
    assert _free_in_cgroup() == sys.maxsize
    assert free_in_cgroup(folder, "max\n", "300000\n") == sys.maxsize


def test_the_smaller_of_both_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(device="cpu")
    available = psutil.virtual_memory().available
    monkeypatch.setattr(machine, "_free_in_cgroup", lambda: 1_000_000)
    limits = find_limits(settings)
    assert 0 < limits.device_bytes == limits.host_bytes < 1_000_000
    monkeypatch.setattr(machine, "_free_in_cgroup", lambda: sys.maxsize)
    assert 1_000_000 < find_limits(settings).host_bytes < 2 * available


def limits_of(monkeypatch: pytest.MonkeyPatch, free_host: int, num_sharing: int = 1, **stated: int) -> MachineLimits:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: free_host)
    return find_limits(Settings(memory=Memory(**stated)), num_sharing)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 1,000 bytes free."""
    monkeypatch.setattr(machine, "choose_device", lambda settings: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "_free_on", lambda device: 1000)


@pytest.mark.parametrize(("free_gib", "usual_gib"), [(40, 32), (80, 64), (128, 112), (320, 304), (1000, 950)])
def test_of_much_host_memory_less_is_left_in_proportion(free_gib: int, usual_gib: int) -> None:
    assert usual_host_bytes(free_gib << 30) == usual_gib << 30


@pytest.mark.usefixtures("card")
def test_a_stated_maximum_is_bounded_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = limits_of(monkeypatch, 5000)
    assert (usual.device_bytes, usual.host_bytes, usual.pinned_bytes) == (800, 4000, 4000)
    within = limits_of(monkeypatch, 5000, max_weight_memory=900, max_host_memory=4500, max_pinned_memory=4400)
    assert (within.device_bytes, within.host_bytes, within.pinned_bytes) == (900, 4500, 4400)
    stated = {"max_weight_memory": 1900, "max_host_memory": 9000, "max_pinned_memory": 8000}
    above = limits_of(monkeypatch, 5000, **stated)
    assert (above.device_bytes, above.host_bytes, above.pinned_bytes) == (1000, 5000, 5000)
    two = limits_of(monkeypatch, 5001, 2, **stated)
    assert (two.device_bytes, two.host_bytes, two.pinned_bytes) == (1000, 2500, 2500)


@pytest.mark.usefixtures("card")
def test_each_stated_figure_above_what_there_is_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(num_sharing: int = 1, **stated: int) -> list[str]:
        limits = limits_of(monkeypatch, 5001, num_sharing, **stated)
        return list(limits.overstated(Memory(**stated), 1000))

    keys = ("max_device_memory", "max_weight_memory", "max_host_memory", "max_pinned_memory")
    lines = said(**dict.fromkeys(keys, 6000))
    assert [line.split()[0] for line in lines] == [f"zinfer.{key}" for key in keys]
    assert lines[2] == (
        "zinfer.max_host_memory is 6.00 kB, more than the 5.00 kB that there are for it: these are planned with"
    )
    assert not said(**dict.fromkeys(keys, 1000))
    assert not said(max_host_memory=5001, num_sharing=2)
    assert len(said(max_host_memory=5003, num_sharing=2)) == 1


def test_on_a_cpu_a_large_maximum_leaves_the_device_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for stated, host_bytes in [({}, 400), ({"max_weight_memory": 100}, 700), ({"max_weight_memory": 900}, 400)]:
        found = limits_of(monkeypatch, 1000, max_host_memory=10**6, **stated)
        assert (found.host_bytes, found.pinned_bytes) == (host_bytes, host_bytes)
    assert limits_of(monkeypatch, 1000, max_host_memory=300).host_bytes == 300
    two = limits_of(monkeypatch, 1000, 2, max_host_memory=10**6, max_weight_memory=100)
    assert (two.device_bytes, two.host_bytes) == (100, 300)


@pytest.mark.usefixtures("card")
def test_a_container_s_limit_counts_more_than_what_a_virtual_machine_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert free_in_cgroup(folder, "9000", "1000") == 8000
    assert limits_of(monkeypatch, 3000).host_bytes == 2400
    assert limits_of(monkeypatch, 3000, max_host_memory=7000).host_bytes == 7000
    assert limits_of(monkeypatch, 3000, max_host_memory=10_000).host_bytes == 8000
