"""What the machine lends: a container's memory limit counts as well as the machine's own."""

import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from zinfer.config import Memory, Settings
from zinfer.probe import cgroups
from zinfer.probe import limits as machine
from zinfer.probe.cgroups import free_group_bytes, memory_limit
from zinfer.probe.limits import MachineLimits, find_limits, usual_host_bytes

UNLIMITED_V1 = "9223372036854771712"
V2 = "31 24 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
NEITHER = "31 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /, without control groups at first."""
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    return tmp_path


def make_groups(root: Path, mount: str, own: str, groups: Mapping[str, Mapping[str, int | str]]) -> None:
    """Write what the kernel would: a mount, the line of /proc/self/cgroup, and each group's files by its folder.

    Counts of `memory.stat` are those whose names are no file's.
    """
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text(f"22 1 0:20 / /pro\\040c rw - proc proc rw\n{mount}\n")
    (root / "proc/self/cgroup").write_text(f"{own}\n")
    for folder, files in groups.items():
        group = root / folder
        group.mkdir(parents=True, exist_ok=True)
        stat = {name: 0 for prefix in ("", "total_") for name in (f"{prefix}inactive_file", f"{prefix}active_file")}
        for name, value in files.items():
            if name.startswith("memory."):
                (group / name).write_text(f"{value}\n")
            else:
                stat[name] = int(value)
        (group / "memory.stat").write_text("".join(f"{name} {count}\n" for name, count in stat.items()))


def v2(limit: int | str, used: int, **more: int | str) -> dict[str, int | str]:
    high = more.pop("high", "max")
    return {"memory.max": limit, "memory.high": high, "memory.current": used, **more}


def v1(limit: int | str, used: int, **more: int) -> dict[str, int | str]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, **more}


TOP2, TOP1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
JOB2, JOB1 = f"{TOP2}/slurm/job_5", f"{TOP1}/slurm/job_5"


@pytest.mark.parametrize(
    ("mount", "own", "groups", "limit", "free"),
    [
        (NEITHER, "1:cpu:/a", {}, None, sys.maxsize),
        (V2, "0::/", {TOP2: v2("max", 300)}, None, sys.maxsize),
        (V2, "0::/", {TOP2: v2(1000, 300)}, 1000, 700),
        (V2, "0::/", {TOP2: v2(1000, 1200)}, 1000, 0),
        (V2, "0::/", {TOP2: v2(1000, 300, inactive_file=150, active_file=50, shmem=40)}, 1000, 900),
        # The job's own group, its parent, and both: what the tightest leaves.
        (V2, "0::/slurm/job_5", {JOB2: v2(1000, 300)}, 1000, 700),
        (V2, "0::/slurm/job_5/step_0", {JOB2: v2(1000, 300), f"{JOB2}/step_0": v2("max", 300)}, 1000, 700),
        (V2, "0::/slurm/job_5", {f"{TOP2}/slurm": v2(2000, 1900), JOB2: v2(1000, 300)}, 1000, 100),
        (V2, "0::/slurm/job_5", {TOP2: {}, f"{TOP2}/slurm": v2(500, 100), JOB2: v2(1000, 50)}, 500, 400),
        (V2, "0::/user.slice", {f"{TOP2}/user.slice": v2(1000, 300, high=800)}, 800, 500),
        (V2, "0::/user.slice", {f"{TOP2}/user.slice": v2("max", 300, high=800)}, 800, 500),
        (V2, "0::/other", {JOB2: v2(1000, 300)}, None, sys.maxsize),
        # A container sees its path on the host, or a namespace's way out of it, beside a mount of its own group alone.
        (V2.replace(" / /sys", " /docker/1 /sys"), "0::/docker/1", {TOP2: v2(1000, 300)}, 1000, 700),
        (V2.replace(" / /sys", " /docker/1 /sys"), "0::/docker/1/a", {f"{TOP2}/a": v2(1000, 300)}, 1000, 700),
        (V2, "0::/../job_6", {TOP2: v2(1000, 300)}, 1000, 700),
        (V1.replace(" / /sys", " /docker/1 /sys"), "4:memory:/docker/1", {TOP1: v1(1000, 300)}, 1000, 700),
        (V1.replace("/sys/fs/cgroup", "/c\\040g"), "4:memory:/a", {"c g/memory/a": v1(1000, 300)}, 1000, 700),
        (V1, "4:memory:/", {TOP1: v1(UNLIMITED_V1, 300)}, None, sys.maxsize),
        (V1, "4:cpu,memory:/slurm/job_5", {JOB1: v1(1000, 300, total_inactive_file=100)}, 1000, 800),
        (V1, "4:memory:/slurm/job_5/step", {JOB1: v1(1000, 300), f"{JOB1}/step": v1(UNLIMITED_V1, 300)}, 1000, 700),
        (
            V1,  # of memory and swap together 200 are left: what is swapped out counts
            "4:memory:/slurm/job_5",
            {JOB1: v1(1000, 300) | {"memory.memsw.limit_in_bytes": 1000, "memory.memsw.usage_in_bytes": 800}},
            1000,
            200,
        ),
    ],
)
def test_the_tightest_group_on_the_way_to_the_root_limits_memory(
    root: Path,
    mount: str,
    own: str,
    groups: Mapping[str, Mapping[str, int | str]],
    limit: int | None,
    free: int,
) -> None:
    make_groups(root, mount, own, groups)
    assert memory_limit() == limit
    assert free_group_bytes() == free


def test_a_kernel_without_control_groups_sets_no_limit() -> None:
    assert (memory_limit(), free_group_bytes()) == (None, sys.maxsize)


def test_the_smaller_of_both_is_shared_out(root: Path) -> None:
    settings = Settings(device="cpu")
    available = psutil.virtual_memory().available
    assert 1_000_000 < find_limits(settings).host_bytes < 2 * available
    make_groups(root, V2, "0::/a", {f"{TOP2}/a": v2(1_000_000, 0)})
    limits = find_limits(settings)
    assert 0 < limits.device_bytes == limits.host_bytes < 1_000_000


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
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_groups(root, V2, "0::/", {TOP2: v2(9000, 1000)})
    assert limits_of(monkeypatch, 3000).host_bytes == 2400
    assert limits_of(monkeypatch, 3000, max_host_memory=7000).host_bytes == 7000
    assert limits_of(monkeypatch, 3000, max_host_memory=10_000).host_bytes == 8000
