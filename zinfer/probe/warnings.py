"""What holds a machine back, each in one line with its remedy. Pure: findings and facts in, lines out."""

from collections.abc import Iterator
from typing import Final

from zinfer.probe.facts import HostFacts
from zinfer.probe.findings import DeviceFindings, Findings
from zinfer.units import human_bytes

_SLOW_DISK_RATIO: Final = 4.0  # below it a modest share of the model on disk still hides behind the link


def find_warnings(findings: Findings, facts: HostFacts) -> tuple[str, ...]:
    """All lines that the findings of this machine give rise to."""
    checks = (_narrow_links, _refused_pins, _remote_nodes, _cached_disks, _slow_disks, _memory_limits, _small_pages)
    return tuple(line for check in checks for line in check(findings, facts))


def _on_cuda(device: DeviceFindings) -> bool:
    return device.link.kind != "host copies"


def _narrow_links(findings: Findings, facts: HostFacts) -> Iterator[str]:
    for index, device in enumerate(findings.devices):
        link = device.pcie
        if link is not None and (link.width < link.most_width or link.generation < link.most_generation):
            yield (
                f"GPU {index} runs at {link}, the card can do PCIe {link.most_generation} x{link.most_width}: put it "
                "into a slot with all its lanes, without a riser, and set the slot's generation in the firmware"
            )


def _refused_pins(findings: Findings, facts: HostFacts) -> Iterator[str]:
    """A low memory-lock limit counts only where pinning more than it was not seen to work: many drivers ignore it."""
    on_cuda = [device for device in findings.devices if _on_cuda(device)]
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
            f"the container may use {human_bytes(limit)} of the host's {human_bytes(facts.memory_bytes)}, fewer blocks "
            "fit into host memory: raise its limit (docker run --memory, the pod's resources.limits.memory)"
        )


def _small_pages(findings: Findings, facts: HostFacts) -> Iterator[str]:
    if not facts.huge_pages:
        yield (
            "transparent huge pages are off, memory is given in pages of 4 KiB: loading models and reading fast disks "
            "take longer; allow them (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)"
        )
