"""What the system and nvidia-smi say: made-up trees and programs, real files and processes."""

import logging
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.probe.card import PcieLink, parse_links, query_links, read_uuid
from zinfer.probe.warnings import read_facts
from zinfer.ranks.numa import parse_cpus, pin_to_node

LINES = """\
GPU-aaaa-1, 00000000:18:00.0, 16, 16, 5, 5
GPU-bbbb-2, 00000001:2A:00.0, 8, 16, 3, 4
GPU-cccc-3, 00000000:3B:00.0, [N/A], 16, [N/A], 5
MIG-dddd-4
"""


def test_links_are_read_by_uuid_and_unknown_ones_left_out() -> None:
    assert parse_links(LINES) == {
        "aaaa-1": PcieLink("0000:18:00.0", 16, 16, 5, 5),
        "bbbb-2": PcieLink("0001:2a:00.0", 8, 16, 3, 4),
    }
    assert parse_links("") == {}


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Makes an `nvidia-smi` that is found first."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat <<E\n{LINES}E')
    assert query_links() == parse_links(LINES)
    asked = (tmp_path / "asked").read_text()
    assert asked.count(",") == 7
    assert "pcie.link.width.current" in asked


def test_an_absent_nvidia_smi_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert query_links() == {}
    assert not caplog.records


@pytest.mark.parametrize("text", ["exit 9", "sleep 5"])
def test_an_nvidia_smi_that_fails_is_said(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zinfer.probe.card._MOST_SECONDS", 0.2)
    program(tmp_path, monkeypatch, f"exec {text}")
    with caplog.at_level(logging.WARNING):
        assert query_links() == {}
    assert "the PCIe links are not known" in caplog.text


@pytest.mark.gpu
def test_this_machines_links_are_those_of_its_gpus() -> None:
    links = query_links()
    for index in range(torch.cuda.device_count()):
        uuid = read_uuid(torch.device("cuda", index))
        assert not uuid.startswith("GPU-")
        if links:  # a virtual machine may hide them all
            assert 1 <= links[uuid].width <= links[uuid].most_width <= 32


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /sys."""
    monkeypatch.setattr("zinfer.probe.warnings._SYSTEM", tmp_path)
    monkeypatch.setattr("zinfer.ranks.numa._SYSTEM", tmp_path)
    monkeypatch.setattr("zinfer.probe.cgroups._ROOT", tmp_path)
    return tmp_path


def make_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_facts_of_a_system_with_two_nodes(root: Path) -> None:
    make_files(
        root,
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "31 24 0:28 / /fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "fs/cgroup/job/memory.max": "1000000\n",
            "fs/cgroup/job/memory.current": "1\n",
            "fs/cgroup/job/memory.stat": "inactive_file 0\nactive_file 0\n",
            "devices/system/node/node0/cpulist": "0-3,8-9\n",
            "devices/system/node/node1/cpulist": "4-7\n",
            "devices/system/node/node2/cpulist": "\n",
            "devices/system/node/online": "0-2\n",
            "bus/pci/devices/0000:18:00.0/numa_node": "1\n",
            "bus/pci/devices/0000:2a:00.0/numa_node": "-1\n",
        },
    )
    facts = read_facts(["0000:18:00.0", "0000:2a:00.0", "0000:3b:00.0", None])
    assert facts.cgroup_bytes == 1_000_000
    assert facts.node_cpus == {0: frozenset({0, 1, 2, 3, 8, 9}), 1: frozenset({4, 5, 6, 7}), 2: frozenset()}
    assert facts.gpu_nodes == (1, None, None, None)


def test_threads_are_pinned_to_the_node_of_their_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, frozenset[int]] = {}
    threads: list[int] = []
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda task: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr("os.sched_setaffinity", lambda task, cpus: pinned.update({task: frozenset(cpus)}))
    make_files(root, {"devices/system/node/node0/cpulist": "0-3\n"})
    assert pin_to_node(0) == frozenset(), "one node: nothing to choose"
    make_files(root, {f"devices/system/node/node{node}/cpulist": text for node, text in ((1, "4-7\n"), (2, "8-9\n"))})
    for node in (None, 2, 3):
        assert pin_to_node(node) == frozenset(), "not known, or all its processors are others'"
    assert not pinned
    assert pin_to_node(1) == {4, 5}
    assert threading.get_native_id() in pinned
    assert set(pinned.values()) == {frozenset({4, 5})}
    assert threads == [2]


@pytest.mark.parametrize(
    ("text", "given"),
    [("[always] madvise never\n", True), ("always [madvise] never\n", True), ("always madvise [never]\n", False)],
)
def test_huge_pages_are_given_unless_they_are_off(text: str, given: bool, root: Path) -> None:
    make_files(root, {"kernel/mm/transparent_hugepage/enabled": text})
    assert read_facts([]).huge_pages is given


def test_facts_of_a_system_that_says_nothing(root: Path) -> None:
    facts = read_facts([])
    assert (facts.cgroup_bytes, facts.huge_pages, facts.node_cpus, facts.gpu_nodes) == (None, False, {}, ())


def test_facts_of_this_process() -> None:
    facts = read_facts([])
    assert facts.own_cpus == os.sched_getaffinity(0)
    assert facts.memory_bytes > 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert facts.memlock_bytes == (None if soft == resource.RLIM_INFINITY else soft)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_the_kernel_writes_them(cpus: set[int]) -> None:
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    text = ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    assert parse_cpus(text + "\n") == cpus
