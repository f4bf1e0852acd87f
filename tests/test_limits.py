"""What the machine lends: a container's memory limit counts as well as the machine's own."""

import sys
from pathlib import Path

import psutil
import pytest

from zinfer.config import Settings
from zinfer.probe import limits as machine
from zinfer.probe.limits import _free_in_cgroup, find_limits


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /sys/fs/cgroup."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


def free_in_cgroup(folder: Path, limit: str, used: str) -> int:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(used)
    return _free_in_cgroup()


def test_a_limit_leaves_what_is_not_used(folder: Path) -> None:
    assert free_in_cgroup(folder, "1000000\n", "300000\n") == 700_000


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
