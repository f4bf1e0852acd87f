"""What the machine lends: a container's memory limit counts as well as the machine's own."""

import sys
from pathlib import Path

import psutil
import pytest

from zinfer.config import Settings
from zinfer.probe import limits as machine
from zinfer.probe.limits import _free_in_cgroup, find_limits


def cgroup(folder: Path, limit: str, used: str) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(used)
    return folder


def test_a_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    assert _free_in_cgroup(cgroup(tmp_path, "1000000\n", "300000\n")) == 700_000


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    assert _free_in_cgroup(cgroup(tmp_path, "1000\n", "1200\n")) == 0


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert _free_in_cgroup(tmp_path) == sys.maxsize
    assert _free_in_cgroup(tmp_path / "nowhere") == sys.maxsize
    assert _free_in_cgroup(cgroup(tmp_path, "max\n", "300000\n")) == sys.maxsize


def test_the_smaller_of_both_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(device="cpu")
    available = psutil.virtual_memory().available
    monkeypatch.setattr(machine, "_free_in_cgroup", lambda: 1_000_000)
    limits = find_limits(settings)
    assert 0 < limits.device_bytes == limits.host_bytes < 1_000_000
    monkeypatch.setattr(machine, "_free_in_cgroup", lambda: sys.maxsize)
    assert 1_000_000 < find_limits(settings).host_bytes < 2 * available
