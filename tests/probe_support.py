"""Shared by tests of `zinfer.probe`: small sizes, and findings of an invented machine."""

from dataclasses import replace
from datetime import date
from typing import Any

from zinfer.probe.card import MachineCard, PcieLink
from zinfer.probe.disk import DiskFindings, DiskRate
from zinfer.probe.findings import Findings
from zinfer.probe.measure import DeviceFindings, LinkRates, LinksTogether, MemoryRates
from zinfer.probe.sizes import Sizes
from zinfer.probe.warnings import HostFacts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

TINY = Sizes(
    link_bytes=MIB,
    host_bytes=MIB,
    device_bytes=MIB,
    matmul_width=64,
    num_matmuls=2,
    repeats=2,
    block_sizes=(64 * KIB, 256 * KIB),
    read_depths=(1, 2),
    write_depths=(2,),
    seconds_per_point=0.01,
    file_bytes=2 * MIB,
)

CARD = MachineCard("a processor", 16, ("a GPU", "a GPU"), "580.1")
FULL_LINK = PcieLink("0000:18:00.0", 16, 16, 5, 5)
DISK = DiskFindings(
    "/models",
    7,
    (
        DiskRate("read", 4 * MIB, 8, 20e9, direct=True),
        DiskRate("read", MIB, 1, 2e9, direct=True),
        DiskRate("write", MIB, 1, 3e9, direct=True),
    ),
)
CALM_FACTS = HostFacts(
    memory_bytes=512 * GIB,
    cgroup_bytes=None,
    memlock_bytes=None,
    huge_pages=True,
    node_cpus={0: frozenset(range(16))},
    own_cpus=frozenset(range(16)),
    gpu_nodes=(0, 0),
)


def made_up_device(**changes: Any) -> DeviceFindings:
    """A GPU that nothing holds back."""
    link = LinkRates("pinned copies", GIB, 55e9, 54e9, 101e9)
    return replace(DeviceFindings("a GPU", link, 4.1e12, 790e12, "bfloat16", FULL_LINK, 0.5e-3), **changes)


def made_up_findings(**changes: Any) -> Findings:
    """Two GPUs and one disk that nothing holds back."""
    findings = Findings(
        version=2,
        taken_on=date(2026, 11, 21),
        card=CARD,
        devices=(made_up_device(), made_up_device(flops_per_s=700e12)),
        together=(LinksTogether(2, 110e9),),
        memory=MemoryRates(16, 6e9, 56e9),
        disks=(DISK,),
        warnings=(),
    )
    return replace(findings, **changes)
