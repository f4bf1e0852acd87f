"""Published figures of cards, and the host assumed around each. Imports little: a misspelt name is refused at once.

Memory, its bandwidth and the rate of dense 16-bit matrix products with 32-bit sums are those of NVIDIA's data sheets
and architecture white papers, where sparse rates are halved. PCIe 3, 4 and 5 with 16 lanes carry about 12, 25 and 55
GB/s of their nominal 15.75, 31.5 and 63. Host memory and disk are those of a common computer around such a card: they
are assumed, and can be stated (``--host-memory``, ``--disk``). The A10G, which AWS has, is no A10: its data sheet gives
70 TFLOP/s for 16-bit products, not 125. GeForce cards of that chip have half the rate with 32-bit sums, too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from zinfer.errors import ConfigError

LINK_BYTES_PER_S: Final = MappingProxyType({3: 12e9, 4: 25e9, 5: 55e9})
"""What PCIe with 16 lanes carries, by generation."""


@dataclass(frozen=True)
class DataSheet:
    """A card and the host around it.

    Attributes:
        name: of the preset.
        memory_bytes, memory_bytes_per_s, flops_per_s: published.
        pcie: generation of the link.
        host_bytes: memory of the host.
        disk_bytes_per_s: direct reads.
        aliases: the card's names in `nvidia-smi`.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    pcie: int
    host_bytes: float
    disk_bytes_per_s: float
    aliases: tuple[str, ...]

    @property
    def title(self) -> str:
        """The card in a sentence, such as ``an RTX 4090``."""
        card = re.sub("NVIDIA |GeForce |Tesla ", "", self.aliases[0])
        return f"{'an' if card[0] in 'AHLR' else 'a'} {card}"


def _desktop(name: str, memory: float, bandwidth: float, tflops: float, pcie: int, *aliases: str) -> DataSheet:
    """64 GB of host memory and a fast consumer drive of PCIe 4."""
    return DataSheet(name, memory * 1e9, bandwidth * 1e9, tflops * 1e12, pcie, 64e9, 6e9, aliases)


def _server(name: str, memory: float, bandwidth: float, tflops: float, pcie: int, *aliases: str) -> DataSheet:
    """512 GB of host memory and one data-centre drive of PCIe 4."""
    return DataSheet(name, memory * 1e9, bandwidth * 1e9, tflops * 1e12, pcie, 512e9, 6e9, aliases)


def _instance(name: str, memory: float, bandwidth: float, tflops: float, pcie: int, *aliases: str) -> DataSheet:
    """A small cloud instance: 64 GB of host memory and a local drive that reads 2 GB/s."""
    return DataSheet(name, memory * 1e9, bandwidth * 1e9, tflops * 1e12, pcie, 64e9, 2e9, aliases)


_SHEETS: Final = (
    _instance("t4", 16, 320, 65, 3, "Tesla T4"),
    _instance("a10", 24, 600, 125, 4, "NVIDIA A10"),
    _instance("a10g", 24, 600, 70, 4, "NVIDIA A10G"),
    _instance("l4", 24, 300, 121, 4, "NVIDIA L4"),
    _desktop("rtx3090", 24, 936, 71, 4, "NVIDIA GeForce RTX 3090"),
    _desktop("rtx4090", 24, 1008, 165.2, 4, "NVIDIA GeForce RTX 4090"),
    _desktop("rtx5090", 32, 1792, 209.5, 5, "NVIDIA GeForce RTX 5090"),
    # The host and the disk are those of DeepSpeed's ZeRO-Inference report.
    DataSheet("a6000", 48e9, 768e9, 154.8e12, 4, 256e9, 5.6e9, ("NVIDIA RTX A6000",)),
    _server("l40s", 48, 864, 362, 4, "NVIDIA L40S"),
    _server("a100-40gb", 40, 1555, 312, 4, "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB"),
    _server("a100-80gb", 80, 2039, 312, 4, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    _server("h100-pcie", 80, 2000, 756, 5, "NVIDIA H100 PCIe"),
    _server("h100-sxm", 80, 3350, 989, 5, "NVIDIA H100 80GB HBM3"),
    _server("h200", 141, 4800, 989, 5, "NVIDIA H200"),
    _server("b200", 180, 7700, 2250, 5, "NVIDIA B200"),
)
DATA_SHEETS: Final[Mapping[str, DataSheet]] = MappingProxyType({sheet.name: sheet for sheet in _SHEETS})
"""Cards by the name of their preset, from the smallest to the largest of each kind."""


def find_data_sheet(name: str) -> DataSheet:
    """Return the card of a preset's name, or of its name in `nvidia-smi`; capitals and signs do not matter.

    Raises:
        ConfigError: there is none; names those that begin so, or are spelt alike, or all.
    """
    by_spelling = {_plain(each): sheet for sheet in _SHEETS for each in (sheet.name, *sheet.aliases)}
    found = by_spelling.get(_plain(name)) or by_spelling.get(f"rtx{_plain(name)}")  # "4090"
    if found is not None:
        return found
    spelt = _plain(name)
    longer = [each for each in by_spelling if spelt and each.startswith(spelt)]  # a100: of 40 GB, or of 80
    near = dict.fromkeys(by_spelling[each].name for each in longer or get_close_matches(spelt, by_spelling, 3, 0.6))
    meant = f"did you mean {_either(near)}?" if near else f"there are {', '.join(DATA_SHEETS)}"
    raise ConfigError(f"--machine {name}: no such preset; {meant} (`--machine list` shows all)")


def _plain(name: str) -> str:
    """``nvidiageforcertx4090`` without the maker's and the series' names: ``rtx4090``."""
    return re.sub("nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
