"""Warnings, each from facts that are made up, and each with its remedy in one line."""

from dataclasses import replace

import pytest
from probe_support import CALM_FACTS, DISK, FULL_LINK, GIB, made_up_device, made_up_findings

from zinfer.probe.card import MachineCard
from zinfer.probe.findings import Findings
from zinfer.probe.measure import LinkRates
from zinfer.probe.warnings import HostFacts, find_warnings


def only_warning(findings: Findings, facts: HostFacts = CALM_FACTS) -> str:
    (line,) = find_warnings(findings, facts)
    assert "\n" not in line
    return line


def test_a_machine_that_nothing_holds_back_is_not_warned_of() -> None:
    assert find_warnings(made_up_findings(), CALM_FACTS) == ()
    unknown = made_up_findings(devices=(made_up_device(pcie=None), made_up_device()))
    assert find_warnings(unknown, CALM_FACTS) == ()


@pytest.mark.parametrize(
    ("width", "generation", "words"), [(8, 5, "GPU 1 runs at PCIe 5 x8"), (16, 3, "GPU 1 runs at PCIe 3 x16")]
)
def test_a_link_below_what_the_card_can_do(width: int, generation: int, words: str) -> None:
    narrow = made_up_device(pcie=replace(FULL_LINK, width=width, generation=generation))
    line = only_warning(made_up_findings(devices=(made_up_device(), narrow)))
    assert words in line
    assert "the card can do PCIe 5 x16: put it into a slot with all its lanes" in line


def test_refused_pins() -> None:
    pageable = made_up_device(link=LinkRates("pageable copies", GIB, 10e9, 10e9, 11e9))
    findings = made_up_findings(devices=(made_up_device(), pageable), disks=())
    line = only_warning(findings, replace(CALM_FACTS, memlock_bytes=8 << 20))
    assert "could not be pinned" in line
    assert "ulimit -l unlimited" in line


@pytest.mark.parametrize(("limit", "warned"), [(8 << 20, False), (2 * GIB, True), (512 * GIB, False), (None, False)])
def test_a_memory_lock_limit_counts_unless_more_was_pinned(limit: int | None, warned: bool) -> None:
    lines = find_warnings(made_up_findings(), replace(CALM_FACTS, memlock_bytes=limit))
    assert len(lines) == warned
    assert all("memory-lock limit is 2.15 GB of 549.76 GB" in line and "ulimit -l" in line for line in lines)


def test_without_a_gpu_nothing_is_pinned() -> None:
    host = made_up_device(link=LinkRates("host copies", GIB, 10e9, None, None), pcie=None)
    findings = made_up_findings(card=MachineCard("a processor", 2, (), ""), devices=(host,), disks=())
    assert find_warnings(findings, replace(CALM_FACTS, memlock_bytes=1 << 20, gpu_nodes=())) == ()


TWO_NODES = replace(
    CALM_FACTS, node_cpus={0: frozenset(range(8)), 1: frozenset(range(8, 16)), 2: frozenset()}, gpu_nodes=(1, 1)
)


def test_several_numa_nodes() -> None:
    line = only_warning(made_up_findings(), TWO_NODES)
    assert "2 NUMA nodes, GPU 0, 1 is at node 1" in line
    assert "`numactl --cpunodebind=1 --membind=1 zinfer ...`" in line


def test_each_node_with_gpus_is_named() -> None:
    lines = find_warnings(made_up_findings(), replace(TWO_NODES, gpu_nodes=(0, 1)))
    assert ["--membind=0" in line for line in lines] == [True, False]
    assert ["--membind=1" in line for line in lines] == [False, True]


def test_a_process_at_the_gpus_node_is_left_in_peace() -> None:
    assert find_warnings(made_up_findings(), replace(TWO_NODES, own_cpus=frozenset({8, 9}))) == ()
    assert "node 1" in only_warning(made_up_findings(), replace(TWO_NODES, own_cpus=frozenset({0, 1})))


def test_an_unknown_node_is_said_to_be_unknown() -> None:
    line = only_warning(made_up_findings(), replace(TWO_NODES, gpu_nodes=(None, None)))
    assert "is not known: `nvidia-smi topo -m` shows it as N" in line
    assert find_warnings(made_up_findings(), replace(CALM_FACTS, gpu_nodes=(None, None))) == ()


def test_a_disk_behind_the_page_cache() -> None:
    cached = replace(DISK, rates=tuple(replace(rate, direct=False) for rate in DISK.rates))
    line = only_warning(made_up_findings(disks=(cached,)))
    assert line.startswith("/models: the file system refuses direct I/O")
    assert "local ext4 or xfs" in line


def test_a_disk_far_slower_than_the_link() -> None:
    slow = replace(DISK, rates=(replace(DISK.rates[0], bytes_per_s=5.5e9),))
    line = only_warning(made_up_findings(disks=(slow,)))
    assert "/models: reads at 1/10 of the link: a block on this disk costs as much time as 10 in host memory" in line
    assert "raise zinfer.max_host_memory" in line


def test_a_containers_memory() -> None:
    line = only_warning(made_up_findings(), replace(CALM_FACTS, cgroup_bytes=64 * GIB))
    assert "let this process use 68.72 GB of the host's 549.76 GB" in line
    assert "docker run --memory" in line
    assert find_warnings(made_up_findings(), replace(CALM_FACTS, cgroup_bytes=1024 * GIB)) == ()


def test_small_pages() -> None:
    line = only_warning(made_up_findings(), replace(CALM_FACTS, huge_pages=False))
    assert "transparent huge pages are off" in line
    assert "echo madvise >" in line


def test_several_causes_give_several_lines() -> None:
    facts = replace(TWO_NODES, cgroup_bytes=64 * GIB, memlock_bytes=2 * GIB)
    assert len(find_warnings(made_up_findings(), facts)) == 3
