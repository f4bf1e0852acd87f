"""The findings of a probe: their JSON form, and the file per machine that keeps them between runs."""

import logging
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError

from zinfer.errors import ConfigError
from zinfer.nvme.whole_file import cache_folder, replace_file
from zinfer.probe.card import MachineCard
from zinfer.probe.disk import DiskFindings
from zinfer.probe.measure import DeviceFindings, LinksTogether, MemoryRates
from zinfer.probe.ranks import RankRates
from zinfer.probe.rates import Rates

log = logging.getLogger(__name__)

VERSION: Final = 2
"""Version of the JSON form; others are refused."""


@dataclass(frozen=True)
class Findings:
    """The findings of one machine.

    Attributes:
        devices: its GPUs by index, or only its CPU.
        together: rates of several links at once; empty with one device.
        disks: one entry per device number, the last measured one last.
        warnings: bottlenecks of the machine, each with its remedy.
        ranks: what several processes reach at once, an entry for each number of them.
    """

    version: Literal[2]
    taken_on: date
    card: MachineCard
    devices: tuple[DeviceFindings, ...]
    together: tuple[LinksTogether, ...]
    memory: MemoryRates
    disks: tuple[DiskFindings, ...]
    warnings: tuple[str, ...]
    ranks: tuple[RankRates, ...] = ()

    def __post_init__(self) -> None:
        if len(self.devices) != max(1, len(self.card.gpus)):
            raise ValueError(f"{len(self.devices)} devices, but the card names {len(self.card.gpus)} GPUs")

    def find_disk(self, number: int) -> DiskFindings | None:
        """Return the disk with this device number, or None if it was not measured."""
        return next((disk for disk in self.disks if disk.number == number), None)

    def read_bytes_per_s(self, disk_number: int | None = None) -> float | None:
        """Return the best read rate of a disk, by default the last measured one; None if it was not measured."""
        last = self.disks[-1] if self.disks else None
        disk = last if disk_number is None else self.find_disk(disk_number)
        reads = disk.best("read") if disk is not None else None
        return None if reads is None else reads.bytes_per_s

    def with_disks_of(self, older: "Findings") -> "Findings":
        """Add the disks, and numbers of ranks, that only the older findings have."""
        kept = tuple(disk for disk in older.disks if self.find_disk(disk.number) is None)
        sizes = {(each.num_ranks, each.num_hosts) for each in self.ranks}
        ranks = tuple(each for each in older.ranks if (each.num_ranks, each.num_hosts) not in sizes)
        return replace(self, disks=kept + self.disks, ranks=ranks + self.ranks)

    @property
    def most_ranks(self) -> RankRates | None:
        """What the most ranks of one host that were measured reach; None if none were."""
        return max((each for each in self.ranks if each.num_hosts == 1), key=lambda each: each.num_ranks, default=None)

    @property
    def links_together(self) -> tuple[tuple[int, float], ...]:
        """As of `Rates`: from ranks if they were measured, else from copies of one process to several devices."""
        found = {each.num_devices: each.to_device_bytes_per_s for each in self.together}
        found |= {each.num_ranks: each.to_device_bytes_per_s for each in self.ranks if each.num_hosts == 1}
        return tuple(sorted(found.items()))

    def to_rates(self, device_index: int = 0, disk_number: int | None = None) -> Rates:
        """Return the planner's rates for a device and a disk, by default the last measured one.

        Raises:
            ConfigError: that device or disk was not measured.
        """
        if not 0 <= device_index < len(self.devices):
            raise ConfigError(f"the probe of {self.taken_on} has no device {device_index}; run `zinfer probe` again")
        reads = self.read_bytes_per_s(disk_number)
        if reads is None:
            raise ConfigError(f"the probe of {self.taken_on} has not read this disk; run `zinfer probe --path FOLDER`")
        rates = self.devices[device_index].rates(
            host_bytes_per_s=self.memory.copy_all_bytes_per_s,
            disk_bytes_per_s=reads,
            origin=f"measured by zinfer probe on {self.taken_on}",
        )
        rates = replace(rates, links_together=self.links_together)
        if (ranks := self.most_ranks) is None:
            return rates
        gathers, sums = ranks.gather_bytes_per_s, ranks.all_reduce_bytes_per_s
        return replace(rates, gather_bytes_per_s=gathers, all_reduce_bytes_per_s=sums)

    def to_json(self) -> str:
        """Return a JSON document for `parse_findings`."""
        return _FORM.dump_json(self, indent=2).decode()


_FORM: Final = TypeAdapter(Findings)


def parse_findings(text: str | bytes, source: Path) -> Findings:
    """Parse findings from JSON.

    Raises:
        ConfigError: they are damaged, or written by another version; the message names ``source``.
    """
    try:
        return _FORM.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ConfigError(
            f"{source}: not findings of this zinfer's probe ({where}: {first['msg']}); measure anew with `zinfer probe`"
        ) from error


def load_findings(path: Path) -> Findings:
    """Load findings from a file with the output of `zinfer probe --json`.

    Raises:
        ConfigError: there is no such file, or it does not hold findings.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; write it with `zinfer probe --json > {path}`") from error
    return parse_findings(text, path)


def cache_path(card: MachineCard) -> Path:
    """Return the file of the machine's findings, in `$XDG_CACHE_HOME/zinfer`, by default `~/.cache/zinfer`."""
    return cache_folder() / f"probe-{card.fingerprint}.json"


def recall(card: MachineCard) -> Findings | None:
    """Return the recorded findings; None if there are none, or if the file is invalid, which is logged."""
    path = cache_path(card)
    try:
        return parse_findings(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        log.warning("findings of an earlier probe are ignored: %s", error)
        return None


def record(findings: Findings) -> None:
    """Replace the machine's recorded findings, but keep disks that only the former ones have.

    Logs a warning if the file cannot be written, and leaves it unchanged.
    """
    former = recall(findings.card)
    whole = findings if former is None else findings.with_disks_of(former)
    path = cache_path(findings.card)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, whole.to_json() + "\n")
    except OSError as error:
        reason = "the findings are not kept; set XDG_CACHE_HOME to a folder that can be written to"
        log.warning("%s: %s; %s", path, error.strerror, reason)
