"""Machines to plan for: this machine, and named presets with known figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from zinfer.config import Memory, Settings
from zinfer.errors import ConfigError
from zinfer.planning.preset_names import check_preset_name
from zinfer.probe.limits import HOST_SHARE, MachineLimits, find_limits, free_device_bytes
from zinfer.probe.rates import Rates
from zinfer.ranks.mesh import Mesh

# Measured shares of an H200's published 989 TFLOP/s (dense bf16) and 4.8 TB/s; assumed for other cards too.
_MATRIX_SHARE: Final = 0.8
_DEVICE_MEMORY_SHARE: Final = 0.85
NOTHING_STATED: Final = Memory()


@dataclass(frozen=True)
class Machine:
    """The budgets and rates of a machine.

    Attributes:
        name: for display.
        limits: budgets; ``device_bytes`` is the maximum for weights and slots, even if more is free.
        device_memory_bytes: free for everything: weights, KV cache, activations and the CUDA context.
        rates: rates of the device, and of the disk with the checkpoint.
    """

    name: str
    limits: MachineLimits
    device_memory_bytes: int
    rates: Rates

    def of_mesh(
        self, mesh: Mesh, num_hosts: int = 1, memory: Memory = NOTHING_STATED, num_devices: float | None = None
    ) -> "Machine":
        """Return what one ZeRO rank has of this machine: its device, and its part of the host's memory and rates.

        Ranks that divide each layer count as one of them, with the memory and the rates of all their devices: what a
        pass divides among them is then as long as on one device that is so much larger.

        Args:
            mesh: how the ranks of all hosts are arranged.
            num_hosts: machines like this one.
            memory: budgets of the configuration; a stated one of device memory is for each rank.
            num_devices: as how many devices ranks count that divide each layer; fewer than there are if one has more
                of a layer than others.
        """
        limits, count = self.limits, num_devices or mesh.num_dividing
        num_local = mesh.size // num_hosts
        free_bytes, device_bytes = self.device_memory_bytes, limits.device_bytes
        if not limits.on_cuda:  # one memory for all
            free_bytes //= num_local
            device_bytes = device_bytes // num_local if memory.max_device_memory is None else device_bytes
        part = replace(
            limits,
            device_bytes=int(device_bytes * count),
            host_bytes=int(limits.host_bytes * count / num_local),
            pinned_bytes=int(limits.pinned_bytes * count / num_local),
        )
        rates = self.rates.shared(num_local, num_local / (mesh.zero * mesh.num_dividing)).times(count)
        ranks = f"{mesh.size} ranks" + (f" on {num_hosts} machines" if num_hosts > 1 else "")
        name = f"{self.name}, {ranks}" if mesh.size > 1 else self.name
        return replace(self, name=name, limits=part, device_memory_bytes=int(free_bytes * count), rates=rates)


def _preset(name: str, device_memory_bytes: int, host_memory_bytes: int, rates: Rates) -> Machine:
    host_bytes = int(host_memory_bytes * HOST_SHARE)
    limits = MachineLimits(torch.device("cuda", 0), device_memory_bytes, host_bytes, host_bytes)
    return Machine(name, limits, device_memory_bytes, rates)


PRESETS: Final = {
    machine.name: machine
    for machine in (
        _preset(
            "a6000",
            48_000_000_000,
            256_000_000_000,
            Rates(
                link_bytes_per_s=25e9,
                disk_bytes_per_s=5.6e9,
                host_bytes_per_s=20e9,
                device_bytes_per_s=768e9 * _DEVICE_MEMORY_SHARE,
                flops_per_s=154.8e12 * _MATRIX_SHARE,
                origin="preset a6000",
            ),
        ),
        _preset(
            "h200",
            141_000_000_000,
            512_000_000_000,
            Rates(
                link_bytes_per_s=55.5e9,
                disk_bytes_per_s=4.1e9,
                host_bytes_per_s=56.4e9,
                device_bytes_per_s=4.1e12,
                flops_per_s=790e12,
                origin="preset h200",
                gather_bytes_per_s=400e9,
                all_reduce_bytes_per_s=286e9,
                links_together=((2, 110.9e9), (4, 183e9)),
            ),
        ),
    )
}
"""Machines by name.

a6000: an NVIDIA RTX A6000 in a workstation. 48 GB, 768 GB/s and 154.8 TFLOP/s of dense bf16 are published (NVIDIA's
data sheet and its white paper on GA102), derated here to the shares that an H200 reaches of its own. 256 GB of host
memory and a disk that reads 5.6 GB/s are those of DeepSpeed's ZeRO-Inference report. PCIe 4 x16 carries about 25 GB/s.
Host copies of 20 GB/s are an assumption, what four threads do on a common server.

h200: an NVIDIA H200 in a server with 512 GB; every rate was measured: copies from pinned memory, direct reads by 8
threads, host copies by 16, a copy within the device, a bf16 product of 8192 x 8192 matrices; between GPUs joined by
NVLink gathers of four (350 to 437 GB/s), an all-reduce of 128 MiB of two, and the links of two and four at once.
Nothing is assumed of gathers among a6000s.
"""


def find_preset(name: str, settings: Settings) -> Machine:
    """Return a machine of `PRESETS`, limited by the configuration's budgets.

    Raises:
        ConfigError: there is no such preset (lists all), or the configuration asks for a CPU.
    """
    check_preset_name(name)
    if settings.device == "cpu":
        raise ConfigError(f'zinfer.device is "cpu", but --machine {name} is a GPU; remove one of the two')
    return replace(PRESETS[name], limits=PRESETS[name].limits.stated(settings.memory))


def this_machine(settings: Settings, files: Sequence[Path]) -> Machine:
    """Return this machine, with rates from a recorded `zinfer probe`, or from a quick measurement.

    Args:
        settings: uses the device and budgets.
        files: files of the checkpoint, on the disk to measure; if empty, a recorded probe is required.

    Raises:
        ConfigError: CUDA is requested but missing, or the speed of the disk is unknown.
        OSError: the disk failed.
    """
    from zinfer.probe.known_rates import known_rates  # imports the measurements, which presets do not need

    limits = find_limits(settings)
    return Machine("this machine", limits, free_device_bytes(limits), known_rates(limits.device, files))


def probed_machine(settings: Settings, path: Path) -> Machine:
    """Return this machine's memory with the rates in a file written by `zinfer probe --json`.

    Raises:
        ConfigError: the file is invalid, or its device type (GPU or CPU) is not the planned one.
    """
    from zinfer.probe.findings import load_findings

    limits, findings = find_limits(settings), load_findings(path)
    measured = "cuda" if findings.card.gpus else "cpu"
    if measured != limits.device.type:
        raise ConfigError(
            f"{path}: rates of a {measured} device, but the plan is for {limits.device.type}, with the memory of this "
            f"machine; plan where it was measured, or with --machine"
        )
    rates = findings.to_rates(limits.device.index or 0)
    return Machine(f"this machine, rates of {path.name}", limits, free_device_bytes(limits), rates)
