"""Machines to plan for: this machine, and named presets with known figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from zinfer.config import Memory, Settings
from zinfer.errors import ConfigError
from zinfer.planning.data_sheets import DATA_SHEETS, LINK_BYTES_PER_S, DataSheet, find_data_sheet
from zinfer.probe.limits import MachineLimits, find_limits, free_device_bytes, usual_host_bytes
from zinfer.probe.rates import EXCHANGES, Rates
from zinfer.ranks.mesh import Mesh
from zinfer.units import human_bytes

if TYPE_CHECKING:
    import torch

# Measured shares of an H200's published 989 TFLOP/s (dense bf16) and 4.8 TB/s; assumed for other cards too.
_MATRIX_SHARE: Final = 0.8
_DEVICE_MEMORY_SHARE: Final = 0.85
_HOST_BYTES_PER_S: Final = 20e9  # assumed: what four threads copy on a common server
_LAUNCH_S: Final = 0.4e-3  # of a plain layer; 0.29 to 0.52 ms on hosts of H200s, assumed for others too
NOTHING_STATED: Final = Memory()


@dataclass(frozen=True)
class Machine:
    """The budgets and rates of a machine.

    Attributes:
        name: for display.
        limits: budgets; ``device_bytes`` is the maximum for weights and slots, even if more is free.
        device_memory_bytes: free for everything: weights, KV cache, activations and the CUDA context; whatever the cap.
        rates: rates of the device, and of the disk with the checkpoint.
        title: in a sentence, such as ``an RTX 4090 with 64 GB``.
    """

    name: str
    limits: MachineLimits
    device_memory_bytes: int
    rates: Rates
    title: str = "this machine"

    @property
    def usable_bytes(self) -> int:
        """The device memory for everything, within the configuration's cap."""
        return self.limits.within_cap(self.device_memory_bytes)

    def of_mesh(
        self, mesh: Mesh, num_hosts: int = 1, memory: Memory = NOTHING_STATED, num_devices: float | None = None
    ) -> Machine:
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
            device_bytes = device_bytes // num_local if memory.max_weight_memory is None else device_bytes
        part = replace(
            limits,
            device_bytes=int(device_bytes * count),
            host_bytes=int(limits.host_bytes * count / num_local),
            pinned_bytes=int(limits.pinned_bytes * count / num_local),
            cap_bytes=None if limits.cap_bytes is None else int(limits.cap_bytes * count),
            num_devices=count,
        )
        rates = self.rates.shared(num_local, num_local / (mesh.zero * mesh.num_dividing)).times(count)
        ranks = f"{mesh.size} ranks" + (f" on {num_hosts} machines" if num_hosts > 1 else "")
        part_of = replace(self, limits=part, device_memory_bytes=int(free_bytes * count), rates=rates)
        if mesh.size == 1:
            return part_of
        return replace(part_of, name=f"{self.name}, {ranks}", title=f"{self.title}, {ranks}")


@dataclass(frozen=True)
class StatedMachine:
    """Figures that someone states of a machine; None: as it is.

    Attributes:
        host_bytes: memory of the host; the usual share of it is for weights.
        link_bytes_per_s, disk_bytes_per_s: rates of the link and of the checkpoint's disk.
    """

    host_bytes: int | None = None
    link_bytes_per_s: int | None = None
    disk_bytes_per_s: int | None = None

    def applied_to(self, machine: Machine) -> Machine:
        """Return the machine with these figures; the origin of its rates says which are stated."""
        limits, rates, words = machine.limits, machine.rates, []
        if self.host_bytes is not None:
            host_bytes = usual_host_bytes(self.host_bytes)
            limits = replace(limits, host_bytes=host_bytes, pinned_bytes=host_bytes)
            words.append(f"{human_bytes(self.host_bytes)} of host memory")
        if self.link_bytes_per_s is not None:
            rates = replace(rates, link_bytes_per_s=float(self.link_bytes_per_s))
            words.append(f"link {human_bytes(self.link_bytes_per_s)}/s")
        if self.disk_bytes_per_s is not None:
            rates = replace(rates, disk_bytes_per_s=float(self.disk_bytes_per_s))
            words.append(f"disk {human_bytes(self.disk_bytes_per_s)}/s")
        if not words:
            return machine
        return replace(machine, limits=limits, rates=replace(rates, origin=f"{rates.origin}, {', '.join(words)}"))


AS_IT_IS: Final = StatedMachine()


@dataclass(frozen=True)
class _PlannedDevice:
    """Stands for the torch device of a machine that nothing runs on."""

    type: str = "cuda"
    index: int = 0


def _of_sheet(sheet: DataSheet) -> Machine:
    """Return the machine of a data sheet; its card reaches the shares that an H200 reaches of its own."""
    memory_bytes, host_bytes = int(sheet.memory_bytes), usual_host_bytes(int(sheet.host_bytes))
    limits = MachineLimits(cast("torch.device", _PlannedDevice()), memory_bytes, host_bytes, host_bytes)
    rates = Rates(
        link_bytes_per_s=LINK_BYTES_PER_S[sheet.pcie],
        disk_bytes_per_s=sheet.disk_bytes_per_s,
        host_bytes_per_s=_HOST_BYTES_PER_S,
        device_bytes_per_s=sheet.memory_bytes_per_s * _DEVICE_MEMORY_SHARE,
        flops_per_s=sheet.flops_per_s * _MATRIX_SHARE,
        origin=f"preset {sheet.name}",
        launch_s=_LAUNCH_S,
    )
    return Machine(sheet.name, limits, memory_bytes, replace(rates, **_MEASURED.get(sheet.name, {})))


_MEASURED: Final[dict[str, dict[str, Any]]] = {
    "h200": {
        "link_bytes_per_s": 55.5e9,
        "disk_bytes_per_s": 4.1e9,
        "host_bytes_per_s": 56.4e9,
        "device_bytes_per_s": 4.1e12,
        "flops_per_s": 790e12,
        **EXCHANGES["NVIDIA H200"],
    }
}
"""Rates that were measured, in place of a data sheet's: copies from pinned memory, direct reads by 8 threads, host
copies by 16, a copy within the device, a bf16 product of 8192 x 8192 matrices."""

PRESETS: Final = {name: _of_sheet(each) for name, each in DATA_SHEETS.items()}
"""Machines by name; their figures are those of `zinfer.planning.data_sheets`, or were measured."""


def find_preset(name: str, settings: Settings, stated: StatedMachine = AS_IT_IS) -> Machine:
    """Return a machine of `PRESETS`, limited by the configuration's budgets.

    Args:
        name: of the preset, or of the card in `nvidia-smi`.
        settings: with the budgets.
        stated: figures in place of the preset's.

    Raises:
        ConfigError: there is no such preset (names the nearest), or the configuration asks for a CPU.
    """
    sheet = find_data_sheet(name)
    machine = PRESETS[sheet.name]
    if settings.device == "cpu":
        raise ConfigError(f'zinfer.device is "cpu", but --machine {name} is a GPU; remove one of the two')
    machine, host_bytes = stated.applied_to(machine), stated.host_bytes or int(sheet.host_bytes)
    limits = machine.limits.stated(settings.memory, machine.device_memory_bytes, host_bytes)
    return replace(machine, limits=limits, title=f"{sheet.title} with {host_bytes / 1e9:,.4g} GB")


def this_machine(settings: Settings, files: Sequence[Path] | None) -> Machine:
    """Return this machine, with rates from a recorded `zinfer probe`, or from a quick measurement.

    Args:
        settings: uses the device and budgets.
        files: files of the checkpoint, on the disk to measure; if empty, a recorded probe is required. None: the disk
            counts as infinitely fast.

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
