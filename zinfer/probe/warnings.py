"""Warn of a machine's bottlenecks, from its findings and system settings; one line each, with the remedy."""

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from zinfer.probe.cgroups import memory_limit
from zinfer.probe.findings import Findings
from zinfer.ranks.numa import read_node, read_node_cpus
from zinfer.units import human_bytes

_SYSTEM: Final = Path("/sys")
_SLOW_DISK_RATIO: Final = 4.0  # below that, streaming a small part of the model from disk is still hidden by the link


@dataclass(frozen=True)
class HostFacts:
    """System settings; limits are in bytes, None: no limit.

    ``huge_pages``: whether transparent huge pages are available on request; ``node_cpus``: the processors of each NUMA
    node; ``own_cpus``: those that this process may run on; ``gpu_nodes``: the NUMA node of each GPU, None if unknown.
    """

    memory_bytes: int
    cgroup_bytes: int | None
    memlock_bytes: int | None
    huge_pages: bool
    node_cpus: Mapping[int, frozenset[int]]
    own_cpus: frozenset[int]
    gpu_nodes: tuple[int | None, ...]


def read_facts(gpu_addresses: Sequence[str | None]) -> HostFacts:
    """Read the facts of this machine and process.

    Args:
        gpu_addresses: address of each GPU under /sys/bus/pci/devices, None if unknown.
    """
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        memory_bytes=psutil.virtual_memory().total,
        cgroup_bytes=memory_limit(),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        huge_pages=_read_huge_pages(),
        node_cpus=read_node_cpus(),
        own_cpus=frozenset(os.sched_getaffinity(0)),
        gpu_nodes=tuple(read_node(address) for address in gpu_addresses),
    )


def _read_huge_pages() -> bool:
    """Return whether huge pages are available: "always [madvise] never" (the kernel's admin-guide/mm/transhuge)."""
    try:
        return "[never]" not in (_SYSTEM / "kernel/mm/transparent_hugepage/enabled").read_text()
    except FileNotFoundError:  # a kernel without them
        return False


def find_warnings(findings: Findings, facts: HostFacts) -> tuple[str, ...]:
    """Return all warnings for this machine."""
    checks = (_narrow_links, _refused_pins, _remote_nodes, _cached_disks, _slow_disks, _memory_limits, _small_pages)
    return tuple(line for check in checks for line in check(findings, facts))


def _narrow_links(findings: Findings, facts: HostFacts) -> Iterator[str]:
    for index, device in enumerate(findings.devices):
        link = device.pcie
        if link is not None and (link.width < link.most_width or link.generation < link.most_generation):
            yield (
                f"GPU {index} runs at {link}, the card can do PCIe {link.most_generation} x{link.most_width}: put it "
                "into a slot with all its lanes, without a riser, and set the slot's generation in the firmware"
            )


def _refused_pins(findings: Findings, facts: HostFacts) -> Iterator[str]:
    """Warn of refused pinning, and of a low memory-lock limit unless more was pinned: many drivers ignore the limit."""
    on_cuda = [device for device in findings.devices if device.link.kind != "host copies"]
    if any(device.link.kind == "pageable copies" for device in on_cuda):
        yield (
            "host memory could not be pinned, copies are slow and do not overlap: raise the memory-lock limit "
            "(ulimit -l unlimited, docker run --ulimit memlock=-1)"
        )
        return
    limit = facts.memlock_bytes
    proven = max((device.link.nbytes for device in on_cuda), default=0)
    if on_cuda and limit is not None and proven <= limit < facts.memory_bytes:
        yield (
            f"the memory-lock limit is {human_bytes(limit)} of {human_bytes(facts.memory_bytes)}, pinning more may be "
            "refused: raise it (ulimit -l unlimited, docker run --ulimit memlock=-1)"
        )


def _remote_nodes(findings: Findings, facts: HostFacts) -> Iterator[str]:
    with_cpus = {node: cpus for node, cpus in facts.node_cpus.items() if cpus}
    if len(with_cpus) < 2:
        return
    gpus_by_node: dict[int | None, list[int]] = {}
    for index, node in enumerate(facts.gpu_nodes):
        gpus_by_node.setdefault(node, []).append(index)
    for node, gpus in gpus_by_node.items():
        names = f"GPU {', '.join(map(str, gpus))}"
        begin = f"the host has {len(with_cpus)} NUMA nodes"
        if node is None:
            yield (
                f"{begin}, the one of {names} is not known: `nvidia-smi topo -m` shows it as N; start with "
                "`numactl --cpunodebind=N --membind=N zinfer ...`"
            )
        elif not facts.own_cpus <= facts.node_cpus.get(node, frozenset()):
            yield (
                f"{begin}, {names} is at node {node}, and this process may run on others: start with "
                f"`numactl --cpunodebind={node} --membind={node} zinfer ...`"
            )


def _cached_disks(findings: Findings, facts: HostFacts) -> Iterator[str]:
    for disk in findings.disks:
        if not all(rate.direct for rate in disk.rates):
            yield (
                f"{disk.path}: the file system refuses direct I/O, so these figures are partly the page cache's and "
                "streaming fills it: keep the checkpoint on a local ext4 or xfs disk"
            )


def _slow_disks(findings: Findings, facts: HostFacts) -> Iterator[str]:
    link = findings.devices[0].link.to_device_bytes_per_s
    for disk in findings.disks:
        reads = disk.best("read")
        if reads is not None and link / reads.bytes_per_s > _SLOW_DISK_RATIO:
            ratio = link / reads.bytes_per_s
            yield (
                f"{disk.path}: reads at 1/{ratio:.0f} of the link: a block on this disk costs as much time as "
                f"{ratio:.0f} in host memory. Keep blocks off it (raise zinfer.max_host_memory), send {ratio:.0f} "
                "times the tokens a pass, or stripe several drives"
            )


def _memory_limits(findings: Findings, facts: HostFacts) -> Iterator[str]:
    limit = facts.cgroup_bytes
    if limit is not None and limit < facts.memory_bytes:
        yield (
            f"control groups let this process use {human_bytes(limit)} of the host's "
            f"{human_bytes(facts.memory_bytes)}, so fewer blocks fit into host memory: raise the limit (docker run "
            "--memory, the pod's resources.limits.memory, sbatch --mem, systemd's MemoryMax and MemoryHigh)"
        )


def _small_pages(findings: Findings, facts: HostFacts) -> Iterator[str]:
    if not facts.huge_pages:
        yield (
            "transparent huge pages are off, memory is given in pages of 4 KiB: loading models and reading fast disks "
            "take longer; allow them (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)"
        )
