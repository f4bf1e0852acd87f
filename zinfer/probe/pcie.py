"""What nvidia-smi says of each GPU's PCIe link. Where it is absent or says nothing, the link is not known: no error."""

import csv
import logging
import subprocess
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

_FIELDS: Final = (
    "uuid",
    "pci.bus_id",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pcie.link.gen.current",
    "pcie.link.gen.gpumax",  # of the card; "gen.max" is no more than what the slot has
)
_MOST_SECONDS: Final = 20.0  # nvidia-smi starts the driver first where no persistence daemon runs


@dataclass(frozen=True)
class PcieLink:
    """A GPU's link now and the most that the card can do. ``address`` as under /sys/bus/pci/devices."""

    address: str
    width: int
    most_width: int
    generation: int
    most_generation: int

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.width}"


def query_links() -> dict[str, PcieLink]:
    """Links by the GPU's UUID (without "GPU-"); those that are not known are left out."""
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
    """Lines of nvidia-smi's CSV; a GPU with a field such as "[N/A]" is left out."""
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
