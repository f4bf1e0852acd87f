"""The NUMA nodes of a host, and the one of a GPU: threads and memory near it copy faster.

The only place that pins threads: a rank's run on the processors of its GPU's node, and memory that they touch first is
then that node's too.
"""

import logging
import os
from pathlib import Path
from typing import Any, Final

import torch

log = logging.getLogger(__name__)

_SYSTEM: Final = Path("/sys")
_TASKS: Final = Path("/proc/self/task")


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a kernel CPU list such as ``0-3,8``; empty for a node without processors."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def read_node_cpus() -> dict[int, frozenset[int]]:
    """Return the processors of each NUMA node; empty if the system does not say."""
    return {
        int(folder.name.removeprefix("node")): parse_cpus((folder / "cpulist").read_text())
        for folder in (_SYSTEM / "devices/system/node").glob("node[0-9]*")
    }


def read_node(address: str | None) -> int | None:
    """Return the NUMA node of a GPU by its address under /sys/bus/pci/devices; None if it is not known."""
    if address is None:
        return None
    try:
        node = int((_SYSTEM / "bus/pci/devices" / address / "numa_node").read_text())
    except FileNotFoundError:  # a container or a virtual machine may hide it
        return None
    return None if node < 0 else node


def gpu_node(device: torch.device) -> int | None:
    """Return the NUMA node of a CUDA device; None for others, and if it is not known."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):  # an older torch
        return None
    return read_node(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


def pin_to_node(node: int | None) -> frozenset[int]:
    """Let all threads of this process, and those they start, run on the processors of one NUMA node only.

    Nothing changes if the host has one node, if the GPU's is not known, or if this process may use none of its
    processors: whoever started it has chosen others.

    Returns:
        The processors; none if nothing changed.
    """
    nodes = {each: cpus for each, cpus in read_node_cpus().items() if cpus}
    own = frozenset(os.sched_getaffinity(0))
    chosen = own & nodes.get(node, frozenset()) if node is not None else frozenset()
    if len(nodes) < 2 or not chosen or chosen == own:
        return frozenset()
    for task in _TASKS.iterdir():
        try:
            os.sched_setaffinity(int(task.name), chosen)
        except ProcessLookupError:  # the thread has ended
            continue
    torch.set_num_threads(min(torch.get_num_threads(), len(chosen)))
    log.info("runs on %d of %d processors, those of NUMA node %d with its GPU", len(chosen), len(own), node)
    return chosen
