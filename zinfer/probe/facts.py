"""What the system says of itself that can hold a run back: limits of memory, huge pages, NUMA nodes."""

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class HostFacts:
    """Limits in bytes, None where there is none.

    ``huge_pages``: whether memory that asks for huge pages can get them; ``node_cpus``: the processors of each NUMA
    node; ``own_cpus``: those that this process may run on; ``gpu_nodes``: for each GPU its node, None where the system
    does not say.
    """

    memory_bytes: int
    cgroup_bytes: int | None
    memlock_bytes: int | None
    huge_pages: bool
    node_cpus: Mapping[int, frozenset[int]]
    own_cpus: frozenset[int]
    gpu_nodes: tuple[int | None, ...]


def read_facts(gpu_addresses: Sequence[str | None], root: Path = Path("/")) -> HostFacts:
    """Facts of this process on this machine.

    Args:
        gpu_addresses: for each GPU its address under /sys/bus/pci/devices, None where it is not known.
        root: where sys/ lies.
    """
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        memory_bytes=psutil.virtual_memory().total,
        cgroup_bytes=_read_limit(root / "sys/fs/cgroup/memory.max"),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        huge_pages=_read_huge_pages(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        node_cpus={
            int(folder.name.removeprefix("node")): parse_cpus((folder / "cpulist").read_text())
            for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        },
        own_cpus=frozenset(os.sched_getaffinity(0)),
        gpu_nodes=tuple(_read_node(root, address) for address in gpu_addresses),
    )


def parse_cpus(text: str) -> frozenset[int]:
    """A list of the kernel's such as ``0-3,8``; empty for a node of memory alone."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _read_limit(path: Path) -> int | None:
    """A container's limit (cgroup v2, "memory.max")."""
    try:
        limit = path.read_text().strip()
    except FileNotFoundError:  # not in a container, or cgroup v1
        return None
    return None if limit == "max" else int(limit)


def _read_huge_pages(path: Path) -> bool:
    """Transparent huge pages: the chosen one of "always [madvise] never" (the kernel's admin-guide/mm/transhuge)."""
    try:
        return "[never]" not in path.read_text()
    except FileNotFoundError:  # a kernel without them
        return False


def _read_node(root: Path, address: str | None) -> int | None:
    if address is None:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except FileNotFoundError:  # a container or a virtual machine may hide it
        return None
    return None if node < 0 else node
