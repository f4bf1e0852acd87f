"""Format findings and sweeps as tables."""

from collections.abc import Sequence

from rich.table import Table

from zinfer.probe.disk import DiskRate
from zinfer.probe.findings import Findings
from zinfer.probe.measure import DeviceFindings
from zinfer.probe.ranks import RankRates

_GIGA = 1e9
_MEBI = 1 << 20


def findings_table(findings: Findings) -> Table:
    """Return a table with a section for the disks, the host and each device."""
    table = Table(title=f"zinfer probe: {findings.card.cpu}, {findings.card.num_cores} cores", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("unit")
    table.add_column("how measured", overflow="fold")
    for disk in findings.disks:
        for rate in filter(None, (disk.best("read"), disk.best("write"))):
            how = f"{_how(rate)}, {rate.num_threads} at once of {rate.block_bytes / _MEBI:g} MiB; {disk.path}"
            _add(table, f"disk {rate.operation}s", rate.bytes_per_s, how)
    table.add_section()
    memory = findings.memory
    _add(table, "host copy, 1 thread", memory.copy_one_bytes_per_s, "bytes copied")
    _add(table, f"host copy, {memory.num_threads} threads", memory.copy_all_bytes_per_s, "bytes copied")
    for index, device in enumerate(findings.devices):
        table.add_section()
        _add_device(table, f"GPU {index}" if findings.card.gpus else "CPU", device)
    for together in findings.together:
        how = f"pinned memory to {together.num_devices} GPUs at once, summed"
        _add(table, f"{together.num_devices} links together", together.to_device_bytes_per_s, how)
    for ranks in findings.ranks:
        table.add_section()
        _add_ranks(table, ranks)
    return table


def _add_ranks(table: Table, ranks: RankRates) -> None:
    name = f"{ranks.num_ranks} ranks"
    hosts = f" on {ranks.num_hosts} hosts" if ranks.num_hosts > 1 else ""
    size = f"{ranks.nbytes / _MEBI:g} MiB by {ranks.backend}{hosts}"
    _add(table, f"{name}, links", ranks.to_device_bytes_per_s, "all at once, summed over a host")
    _add(table, f"{name}, gathers", ranks.gather_bytes_per_s, f"{size}, made whole on each")
    _add(table, f"{name}, sums", ranks.all_reduce_bytes_per_s, size)
    nodes = ", ".join("?" if node is None else str(node) for node in ranks.nodes)
    if any(node is not None for node in ranks.nodes):
        table.add_row(f"{name}, NUMA nodes", nodes, "", "of each rank's GPU")
    joined = {link for row in ranks.joined_by for link in row if link != "X"}
    if joined:
        table.add_row("GPUs joined by", ", ".join(sorted(joined)), "", "nvidia-smi topo -m")


def sweep_table(rates: Sequence[DiskRate]) -> Table:
    """Return a table of all points of a sweep."""
    table = Table("operation", "block", "at once", "GB/s", "how")
    for rate in rates:
        speed = f"{rate.bytes_per_s / _GIGA:.2f}"
        table.add_row(rate.operation, f"{rate.block_bytes / _MEBI:g} MiB", str(rate.num_threads), speed, _how(rate))
    return table


def _how(rate: DiskRate) -> str:
    return "direct" if rate.direct else "through the page cache"


def _add(table: Table, what: str, bytes_per_s: float | None, how: str) -> None:
    if bytes_per_s is not None:
        table.add_row(what, f"{bytes_per_s / _GIGA:,.2f}", "GB/s", how)


def _add_device(table: Table, name: str, device: DeviceFindings) -> None:
    link = device.link
    if link.kind == "host copies":
        _add(table, f"{name} link", link.to_device_bytes_per_s, "the device is the host: a copy in host memory")
    else:
        _add(table, f"{name} host to device", link.to_device_bytes_per_s, link.kind)
        _add(table, f"{name} device to host", link.from_device_bytes_per_s, link.kind)
        _add(table, f"{name} both at once", link.both_ways_bytes_per_s, f"{link.kind}, the sum of both ways")
        known = "not known" if device.pcie is None else str(device.pcie)
        table.add_row(f"{name} link", known, "", "nvidia-smi, under load" if device.pcie else "nvidia-smi does not say")
    _add(table, f"{name} memory copy", device.copy_bytes_per_s, "bytes read and written")
    table.add_row(f"{name} matrix product", f"{device.flops_per_s / 1e12:,.2f}", "TFLOP/s", f"dense, {device.dtype}")
