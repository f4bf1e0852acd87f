"""The machine's card: what a probe's figures belong to."""

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class MachineCard:
    """The host's processor and cores, the GPUs that were measured (none: the CPU was) and NVIDIA's driver ("" without
    one)."""

    cpu: str
    num_cores: int
    gpus: tuple[str, ...]
    driver: str

    @property
    def fingerprint(self) -> str:
        """Equal for equal machines; part of a file's name."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def read_card(device_type: str) -> MachineCard:
    """This machine's card, for its GPUs ("cuda") or for its CPU alone ("cpu")."""
    num_gpus = torch.cuda.device_count() if device_type == "cuda" else 0
    return MachineCard(
        cpu=_read_cpu(),
        num_cores=os.cpu_count() or 1,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(num_gpus)),
        driver=_read_driver() if num_gpus else "",
    )


def _read_cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # Arm names no model there


def _read_driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except FileNotFoundError:  # hidden in some containers
        return "not known"
