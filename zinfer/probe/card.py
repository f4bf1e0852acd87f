"""Identify the machine of a probe's figures, and read its GPUs' PCIe links."""

import csv
import hashlib
import json
import logging
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

log = logging.getLogger(__name__)

_FIELDS: Final = (
    "uuid",
    "pci.bus_id",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pcie.link.gen.current",
    "pcie.link.gen.gpumax",  # of the card; "gen.max" is limited by the slot
)
_MOST_SECONDS: Final = 20.0  # without a persistence daemon nvidia-smi first loads the driver


@dataclass(frozen=True)
class MachineCard:
    """The host's processor and cores, the measured GPUs (empty: the CPU was measured) and NVIDIA's driver ("" if there
    is none)."""

    cpu: str
    num_cores: int
    gpus: tuple[str, ...]
    driver: str

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for equal machines; part of the cache file's name."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def read_card(device_type: str) -> MachineCard:
    """Read this machine's card, with its GPUs ("cuda") or only its CPU ("cpu")."""
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


@dataclass(frozen=True)
class PcieLink:
    """A GPU's present link and the card's maximum. ``address`` as under /sys/bus/pci/devices."""

    address: str
    width: int
    most_width: int
    generation: int
    most_generation: int

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.width}"


def query_links() -> dict[str, PcieLink]:
    """Return the links that nvidia-smi reports, by the GPU's UUID without "GPU-"."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=True)
    except FileNotFoundError:
        return {}
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the PCIe links are not known: %s; try `%s` by hand", error, " ".join(command))
        return {}
    return parse_links(answer.stdout)


def parse_links(text: str) -> dict[str, PcieLink]:
    """Parse nvidia-smi's CSV; skip GPUs with a field such as "[N/A]"."""
    links = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_FIELDS) and all(field.strip().isdecimal() for field in row[2:]):
            width, most_width, generation, most_generation = map(int, row[2:])
            # nvidia-smi writes the domain with eight digits, /sys with four.
            address = row[1].strip()[-len("0000:00:00.0") :].lower()
            links[row[0].strip().removeprefix("GPU-")] = PcieLink(
                address, width, most_width, generation, most_generation
            )
    return links


def read_uuid(device: torch.device) -> str:
    """Return a GPU's UUID in nvidia-smi's format, without "GPU-"."""
    return str(torch.cuda.get_device_properties(device).uuid)
